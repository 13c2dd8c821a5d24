"""A pool beside a memory that knows what every page must hold, and beside the simplest account of who has what.

Every call is checked for what it returns and changes; `check` for all counts and rings, which takes longer.

Moves and forward passes touch the memory only when a step is handed out (`drain`), as in a worker; tables and index
are brought up to date after every call (`settle`), as in the manager.
"""

from dataclasses import dataclass

import numpy as np
from page_pool_driver import call_evict, call_fits, call_pin, call_release, call_take, call_take_spare

from girih.kv import pool_state as s
from girih.kv.compiled import Record
from girih.kv.page_pool import PagePool
from girih.kv.pool_check import check_pool

NUM_TAGS = 2


@dataclass
class Page:
    """What is in a page, wherever it is."""

    group: int
    content: int
    column: int
    refs: int = 1
    hits: int = 0
    tags: tuple[int, ...] = (0,) * NUM_TAGS
    written: bool = False


class PoolModel:
    """All calls of the pool, checked; pages by number.

    Args:
        num_slabs: of each stage class.
        pages_per_slab: per stage class, of each group.
        slab_bytes: of all slabs, for the bytes of pages.
        options: of `PagePool`.
    """

    def __init__(self, num_slabs, pages_per_slab, slab_bytes=5040, **options):
        self.class_of = [c for c, groups in enumerate(pages_per_slab) for _ in groups]
        self.per_slab = [k for groups in pages_per_slab for k in groups]
        page_bytes = [max(1, slab_bytes // k) for k in self.per_slab]
        self.pool = PagePool(num_slabs, self.class_of, self.per_slab, page_bytes, NUM_TAGS, **options)
        self.state = self.pool.state
        self.record = Record(self.state)
        self.pages: dict[int, Page] = {}
        self.slabs: dict[tuple[int, int], tuple[int, dict[int, int]]] = {}  # class, slab -> group, page -> content
        self.num_settled = self.num_contents = 0
        self.referenced = [0] * len(self.per_slab)
        self.evicted: list[Page] = []

    def of(self, group, *, cached=None):
        """Return the page numbers of a group, of those that are cached or are not."""
        mine = [number for number, page in self.pages.items() if page.group == group]
        return [number for number in mine if cached is None or (self.pages[number].refs == 0) == cached]

    def fits(self, extra):
        """Return what the formula says, and that the pool says the same."""
        need = [0] * len(self.pool.max_slabs)
        for group, more in enumerate(extra):
            need[self.class_of[group]] += -(-(self.referenced[group] + more) // self.per_slab[group])
        right = all(count <= self.pool.num_slabs(c) for c, count in enumerate(need))
        assert call_fits(self.record, np.array(extra, dtype=np.int64)) == right
        return right

    def room(self, group):
        """Return the pages and slabs from which a page can be taken and nothing happens."""
        record = self.state.groups[group]
        free = record[s.SLABS] * record[s.PAGES_PER_SLAB] - record[s.REFERENCED] - record[s.CACHED]
        return int(free + self.state.classes[self.class_of[group], s.FREE_SLABS])

    def one_more(self, group):
        return self.fits([int(other == group) for other in range(len(self.per_slab))])

    def take(self, group, column=0):
        """Take a page; None if it does not fit."""
        possible = self.one_more(group)
        cheapest = None if self.room(group) else self.cheapest(group)
        page = call_take(self.record, group, column)
        assert (page > 0) == possible
        moved = int(self.state.counts[s.MOVES]) > self.num_settled
        self.settle()
        if self.evicted and not moved and {page.group for page in self.evicted} == {group}:
            assert [page.content for page in self.evicted] == [cheapest], "another page of the group was cheaper"
        return self._add(page, group, column) if possible else None

    def take_spare(self, group, worth, column=0):
        before, possible, room = self.state.counts[s.MOVES], self.one_more(group), self.room(group)
        page = call_take_spare(self.record, group, column, worth)
        assert self.state.counts[s.MOVES] == before, "a spare page is not worth a move"
        self.settle()
        if not possible:
            assert page == 0
        elif room:
            assert page > 0
            assert not self.evicted
        return self._add(page, group, column) if page else None

    def _add(self, page, group, column):
        assert page not in self.pages, "a page in use is handed out"
        self.num_contents += 1
        self.pages[page] = Page(group, self.num_contents, column)
        self.referenced[group] += 1
        return page

    def cheapest(self, group):
        """Return the content of the page of a group that should go first; of equal ones, any may."""
        cached = self.of(group, cached=True)
        rings = {int(self.state.pages[page, s.RING]) for page in cached}
        fronts = [int(self.state.pages[self.state.groups[group, s.RINGS] + ring, s.NEXT]) for ring in sorted(rings)]
        found = min(fronts, key=lambda page: self.state.priorities[page], default=None)
        assert all(self.state.priorities[found] <= self.state.priorities[page] for page in cached)
        return None if found is None else self.pages[found].content

    def tag(self, page, *tags):
        assert self.pages[page].refs > 0
        self.pages[page].tags = (*tags, *[0] * (NUM_TAGS - len(tags)))
        self.state.tags[page] = self.pages[page].tags

    def pin(self, page):
        record = self.pages[page]
        call_pin(self.record, record.group, page)
        self.referenced[record.group] += record.refs == 0
        record.refs += 1
        record.hits = min(record.hits + 1, 7)

    def release(self, page, worth=16):
        record = self.pages[page]
        call_release(self.record, record.group, page, worth)
        record.refs -= 1
        if record.refs == 0:
            self.referenced[record.group] -= 1
            if not record.tags[0]:
                del self.pages[page]
            else:
                sizes = self.state.groups[:, s.PAGE_BYTES]
                scale = round(256 * int(sizes.max()) / int(sizes[record.group]))
                digits = min((worth * (1 + record.hits) * scale + 128 >> 8).bit_length(), s.NUM_RINGS - 1)
                age = self.state.ages[self.class_of[record.group]]
                value = 1.5 * 2.0 ** (digits - 1) / sizes.max()
                assert self.state.priorities[page] == (age + value if digits else 0)

    def cache(self, page, worth=16):
        self.tag(page, 1)
        self.release(page, worth)

    def evict(self, page):
        call_evict(self.record, self.pages[page].group, page)
        self.settle()
        assert page not in self.pages

    def evict_all(self):
        self.pool.evict_all()
        self.settle()
        assert not any(page.refs == 0 for page in self.pages.values())

    def resize(self, stage_class, num_slabs):
        self.pool.resize(stage_class, num_slabs, self.settle)

    def settle(self):
        """Forget what was evicted, note where pages moved; a page may be evicted where it moved to."""
        self.evicted = []
        waiting = []
        for page, *tags in self.pool.take_evicted().tolist():
            if page in self.pages:
                self._forget(page, tags)
            else:
                waiting.append((page, tags))
        new = self.state.moves[self.num_settled : self.state.counts[s.MOVES]].tolist()
        sources, destinations = ({move[end] for move in new} for end in (1, 2))
        assert len(sources) == len(new), "a call moved a page twice"
        assert not sources & destinations, "a page moved to where another one was"
        for group, source, destination in new:
            if destination in self.pages:
                gone = next(item for item in waiting if item[0] == destination)
                waiting.remove(gone)
                self._forget(*gone)
            self.pages[destination] = self.pages.pop(source)
            assert self.pages[destination].group == group
        for gone in waiting:
            self._forget(*gone)
        self.num_settled += len(new)

    def _forget(self, page, tags):
        gone = self.pages.pop(page)
        assert (gone.refs, list(gone.tags)) == (0, tags)
        self.evicted.append(gone)

    def drain(self):
        """Hand out a step: the memory moves pages, then requests write theirs; everything must be where it belongs."""
        moved = self.pool.take_moves().tolist()
        self.num_settled = 0
        for group, source, destination in moved:
            content = self._read(group, source)
            if content is not None:
                self._write(group, destination, content)
        for number, page in self.pages.items():
            if not page.written:
                self._write(page.group, number, page.content)
                page.written = True
        for number, page in self.pages.items():
            assert self._read(page.group, number) == page.content, "a page lost what it held"
        return moved

    def slab_of(self, group, number):
        return (number - int(self.pool.first_page[group])) // self.per_slab[group]

    def _read(self, group, number):
        holds, contents = self.slabs.get((self.class_of[group], self.slab_of(group, number)), (group, {}))
        return contents.get(number) if holds == group else None

    def _write(self, group, number, content):
        key = self.class_of[group], self.slab_of(group, number)
        if self.slabs.get(key, (group,))[0] != group:  # its bytes were another group's
            self.slabs[key] = (group, {})
        self.slabs.setdefault(key, (group, {}))[1][number] = content

    def check(self):
        references = []
        for group, k in enumerate(self.per_slab):
            expected = np.zeros(k * self.pool.max_slabs[self.class_of[group]], dtype=np.int64)
            for number in self.of(group):
                page = self.pages[number]
                expected[number - self.pool.first_page[group]] = page.refs
                found = self.state.pages[number]
                assert found[s.HITS] == page.hits
                assert found[s.COLUMN] == page.column
                assert tuple(self.state.tags[number]) == page.tags
            references.append(expected)
        check_pool(self.pool, references)
        assert np.count_nonzero(self.state.tags[:, 0]) == sum(page.tags[0] > 0 for page in self.pages.values())
