"""`PagePool`: slabs that groups borrow, and the pages in them. Counts references; knows neither requests nor keys.

    free slab --lend--> slab of group g: its pages are   free        handed to nobody
         ^                                               referenced  by block tables, checkpoints, pins
         |                                               cached      by none, but tagged: a key leads to it
         +--- when the last page of a slab becomes free

A page is taken from the fullest slab of its group, so that other slabs run empty; then from a free slab; then in place
of what is worth least among the group's cached pages and the slabs in which nothing is referenced (`eviction.py`);
then pages of another group move together, so that one of its slabs gets empty (`slab_moves.py`). So what is referenced
fits as long as sum over groups of ceil(pages / pages per slab) <= slabs, the formula of `capacity.slabs_needed`.

Taking and releasing are in `slab_pool.py`, for the compiled code of the manager. Pages of all groups are numbered
through, from 1; 0 is no page. Stages with pools of their own have classes of slabs; a group belongs to one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from girih.errors import CapacityError
from girih.kv import pool_state as s
from girih.kv.compiled import Record
from girih.kv.pool_state import PoolState, make_pool_state
from girih.kv.slab_moves import add_slabs, remove_last_slab
from girih.kv.slab_pool import evict_all


class PagePool:
    """The pages of all groups.

    Args:
        num_slabs: slabs of each stage class.
        class_of_group: stage class of each group; groups of a class stand together, classes in order.
        pages_per_slab: of each group.
        page_bytes: of each group; what a page costs, for the balance between groups and for the bill of moves.
        tags_per_page: tags that a page can have.
        max_slabs: of each stage class, as many as `resize` may ask for; None: no more than now. Page numbers depend on
            it.
        move_budget_bytes: bytes that may move between two calls of `take_moves` so that cached pages need not be
            evicted. What must move to make room always does.
    """

    def __init__(
        self,
        num_slabs: Sequence[int],
        class_of_group: Sequence[int],
        pages_per_slab: Sequence[int],
        page_bytes: Sequence[int],
        tags_per_page: int,
        *,
        max_slabs: Sequence[int] | None = None,
        move_budget_bytes: int = 16 << 20,
    ):
        assert [*class_of_group] == sorted(class_of_group), "groups of a stage class stand apart"
        self.max_slabs = tuple(num_slabs if max_slabs is None else max_slabs)
        self.state: PoolState = make_pool_state(
            max_slabs=self.max_slabs,
            class_of_group=class_of_group,
            pages_per_slab=pages_per_slab,
            page_bytes=page_bytes,
            tags_per_page=tags_per_page,
            move_budget_bytes=move_budget_bytes,
        )
        self._record = Record(self.state)
        self.first_page = self.state.groups[:, s.FIRST_PAGE].copy()
        """int64 [num_groups]; the number of each group's page 0."""
        for stage_class, count in enumerate(num_slabs):
            self.resize(stage_class, count)

    def num_slabs(self, stage_class: int = 0) -> int:
        """Return the slabs of a stage class now."""
        return int(self.state.classes[stage_class, s.NUM_SLABS])

    @property
    def num_free_slabs(self) -> int:
        """Return the slabs that no group has borrowed, over all stage classes."""
        return int(self.state.classes[:, s.FREE_SLABS].sum())

    def counts(self) -> dict[str, np.ndarray]:
        """Count slabs and pages now.

        Returns:
            int64 [num_groups] each: "slabs", "busy_slabs" (with a referenced page), and the pages that are "free",
            "referenced", "cached", and of the cached "cold" ones (worth nothing); int64 [stage classes]: "free_slabs".
        """
        groups = self.state.groups
        lent = groups[:, s.SLABS] * groups[:, s.PAGES_PER_SLAB]
        return {
            "slabs": groups[:, s.SLABS].copy(),
            "busy_slabs": groups[:, s.BUSY_SLABS].copy(),
            "free": lent - groups[:, s.REFERENCED] - groups[:, s.CACHED],
            "cached": groups[:, s.CACHED].copy(),
            "cold": groups[:, s.CACHED] - groups[:, s.WARM],
            "referenced": groups[:, s.REFERENCED].copy(),
            "free_slabs": self.state.classes[:, s.FREE_SLABS].copy(),
        }

    def take_moves(self) -> np.ndarray:
        """Return int32 [n, 3]: group, source page, destination page, to be moved one after the other; and forget them.

        Each is returned once. The bytes that cached pages may move are counted from here.
        """
        counts = self.state.counts
        moves = self.state.moves[: counts[s.MOVES]].copy()
        counts[s.MOVES] = counts[s.MOVED_BYTES] = 0
        return moves

    def take_evicted(self) -> np.ndarray:
        """Return int32 [n, 1 + tags_per_page]: page and tags of what was evicted since the last call."""
        evicted = self.state.evicted[: self.state.counts[s.EVICTED]].copy()
        self.state.counts[s.EVICTED] = 0
        return evicted

    def resize(self, stage_class: int, num_slabs: int, settle: Callable[[], object] | None = None) -> None:
        """Grow or shrink a stage class by whole slabs, the last ones.

        What is referenced in slabs that go moves to others; what is cached moves if there is room, else it is evicted.

        Args:
            stage_class: the class.
            num_slabs: slabs that it shall have.
            settle: called after each slab that went, for whoever keeps page numbers and reads `evicted` and `moves`: a
                page may move with one slab, and once more with the next.

        Raises:
            CapacityError: more than there can be, or fewer than hold what is referenced; nothing is changed.
        """
        record, most = self.state.classes[stage_class], self.max_slabs[stage_class]
        needed = int(record[s.NEEDED_SLABS])
        if not needed <= num_slabs <= most:
            mine = self.state.groups[self.state.groups[:, s.STAGE_CLASS] == stage_class]
            slab_bytes = int((mine[:, s.PAGES_PER_SLAB] * mine[:, s.PAGE_BYTES]).max(initial=0))
            raise CapacityError(
                f"{num_slabs} slabs were asked for, but running requests hold {needed} and the pool was made for {most}"
                "; ask for a number between them, or wait until requests have finished",
                need_bytes=max(needed, num_slabs) * slab_bytes,
                have_bytes=min(num_slabs, most) * slab_bytes,
                fitting_tokens=None,
            )
        assert self.state.counts[s.MOVES] <= self.state.counts[s.MAX_MOVES], "moves are not drained"
        add_slabs(self._record, stage_class, num_slabs)
        has_moved = False
        while record[s.NUM_SLABS] > num_slabs:
            moves = int(self.state.counts[s.MOVES])
            remove_last_slab(self._record, stage_class)
            if settle is not None:
                settle()
            elif self.state.counts[s.MOVES] > moves:
                assert not has_moved, "pages may have moved twice, and nobody was told"
                has_moved = True

    def take_freed_slabs(self, stage_class: int = 0) -> np.ndarray:
        """Return the slabs that nobody has borrowed and somebody had, each once after it was used.

        A slab that pages have yet to move out of waits until `take_moves` was called.

        Returns:
            int64 [n], counted from 0 within the class: slab i starts at i * slab_bytes.
        """
        slabs, first = self.state.slabs, int(self.state.classes[stage_class, s.FIRST_SLAB])
        mine = slabs[first : first + self.max_slabs[stage_class]]
        freed = (mine[:, s.OWNER] < 0) & (mine[:, s.USED] > 0)
        moves = self.state.moves[: self.state.counts[s.MOVES]]
        groups = self.state.groups[moves[:, 0]]
        for pages in (moves[:, 1], moves[:, 2]):
            at = (pages - groups[:, s.FIRST_PAGE]) // groups[:, s.PAGES_PER_SLAB]
            freed[at[groups[:, s.STAGE_CLASS] == stage_class]] = False
        mine[freed, s.USED] = 0
        return np.flatnonzero(freed)

    def evict_all(self) -> None:
        """Evict every cached page."""
        evict_all(self._record)
