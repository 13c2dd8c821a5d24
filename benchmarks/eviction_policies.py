"""What other caches would keep: compact models of three policies, in a memory without any fragmentation.

All see the same blocks of 16 tokens and the same layers as the real manager: full attention needs every block of a
reused prefix, a window the run before its end, a recurrent layer the state at exactly its end.

    LRU      one queue of pages of all groups, in the order in which they were released (vLLM)
    Jenga    the pages of a request age together in all groups, the end of a sequence goes before its beginning
    Marconi  per checkpoint recency + alpha * (computation saved per byte), both scaled to 0..1; see `Marconi`
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from eviction_traces import BLOCK_TOKENS, TracedRequest

FULL, EXTRA = 0, 1


@dataclass(frozen=True)
class CacheShape:
    """The bytes of a model's cache, in two groups: full attention, and windows or states.

    Args:
        full_bytes: a block of all full attention layers.
        extra_bytes: a block of all window layers, or one state of all recurrent layers.
        window_blocks: blocks that a window needs before the end of a reused prefix; None: the extra group has states.
        token_flops: computation per token that does not depend on its position.
        position_flops: computation per token and token before it.
    """

    full_bytes: int
    extra_bytes: int
    window_blocks: int | None
    token_flops: float
    position_flops: float

    def extras(self, num_blocks: int) -> range:
        """Return the blocks whose extra page is needed to go on behind the first `num_blocks` blocks."""
        span = 1 if self.window_blocks is None else self.window_blocks
        return range(max(0, num_blocks - span), num_blocks)

    def span_bytes(self, first_block: int, last_block: int) -> int:
        """Return the bytes of blocks first_block .. last_block - 1 with what is needed to go on behind them."""
        return (last_block - first_block) * self.full_bytes + len(self.extras(last_block)) * self.extra_bytes

    def flops(self, first_block: int, last_block: int) -> float:
        """Return the computation of the tokens of blocks first_block .. last_block - 1."""
        first, last = first_block * BLOCK_TOKENS, last_block * BLOCK_TOKENS
        return (last - first) * (self.token_flops + self.position_flops * (first + last) / 2)


class Tree:
    """Every prefix of whole blocks that was ever seen has a number, 1 and up; 0 is the empty prefix."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, bytes], int] = {}

    def path(self, token_ids: np.ndarray) -> list[int]:
        """Return the numbers of the prefixes of 1, 2, ... whole blocks."""
        blocks = len(token_ids) // BLOCK_TOKENS
        raw, size, node, found = token_ids.tobytes(), BLOCK_TOKENS * token_ids.itemsize, 0, []
        for block in range(blocks):
            key = node, raw[block * size : (block + 1) * size]
            node = self._numbers.setdefault(key, len(self._numbers) + 1)
            found.append(node)
        return found


@dataclass
class PageCache:
    """LRU and Jenga: pages with a time each; the least goes first.

    Args:
        shape: the model.
        capacity_bytes: of the pool.
        balanced: Jenga's times instead of the order of release.
    """

    shape: CacheShape
    capacity_bytes: int
    balanced: bool
    used_bytes: int = 0
    now: int = 0
    tree: Tree = field(default_factory=Tree)
    _time: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)  # of (group, node)
    _heap: list[tuple[tuple[float, ...], tuple[int, int]]] = field(default_factory=list)
    _pinned: set[tuple[int, int]] = field(default_factory=set)

    def run(self, request: TracedRequest) -> int:
        """Take one request from admission to its end; return its cached tokens."""
        self.now += 1
        path = self.tree.path(request.token_ids[:-1])
        known = next((i for i, node in enumerate(path) if (FULL, node) not in self._time), len(path))
        last = (request.num_prompt - 1) // BLOCK_TOKENS
        hit = next(n for n in range(min(known, last), -1, -1) if self._can_start(path, n))
        needed = {(EXTRA, path[block]) for block in self.shape.extras(hit)} if hit else set()
        self._pinned = {(FULL, node) for node in path} | needed
        kept = {last, len(path)} | ({known} if hit < known <= last else set())
        for block in range(hit, len(path)):
            self._add((FULL, path[block]))
            if self.shape.window_blocks is not None or block + 1 in kept:
                self._add((EXTRA, path[block]))
        self._pinned = set()
        self._release(path, needed, hit)
        return hit * BLOCK_TOKENS

    def _can_start(self, path: list[int], num_blocks: int) -> bool:
        return all((EXTRA, path[block]) in self._time for block in self.shape.extras(num_blocks))

    def _add(self, page: tuple[int, int]) -> None:
        if page in self._time:
            return
        size = self._bytes(page)
        while self.used_bytes + size > self.capacity_bytes:
            time, victim = heapq.heappop(self._heap)
            if self._time.get(victim) == time:
                if victim in self._pinned:
                    self._time[victim] = (np.inf,)  # gets its real time when the request ends
                    continue
                del self._time[victim]
                self.used_bytes -= self._bytes(victim)
        self.used_bytes += size
        self._set(page, (self.now - 1 + 0.5,))

    def _release(self, path: list[int], needed: set[tuple[int, int]], hit: int) -> None:
        depth = len(path)
        final = {path[block] for block in self.shape.extras(depth)}
        for block, node in enumerate(path):
            # the end of a sequence goes first; a page that nothing needed to the end was released on the way
            self._set((FULL, node), (self.now, -block) if self.balanced else (self.now, 1, -block))
            page = (EXTRA, node)
            if page not in self._time or (block < hit and page not in needed):
                continue
            if node in final or self.shape.window_blocks is None:
                self._set(page, (self.now, -block) if self.balanced else (self.now, 2, -block))
            else:
                self._set(page, (self.now - 1 + (block + 1) / (depth + 1),))

    def _set(self, page: tuple[int, int], time: tuple[float, ...]) -> None:
        self._time[page] = time
        heapq.heappush(self._heap, (time, page))

    def _bytes(self, page: tuple[int, int]) -> int:
        return self.shape.extra_bytes if page[0] == EXTRA else self.shape.full_bytes


@dataclass
class _Checkpoint:
    path: list[int]
    parent: int  # its node, 0: none
    last_use: int = 0
    children: int = 0


@dataclass
class Marconi:
    """Marconi (Pan et al., 2024): checkpoints at branch points and ends, and utility by recency and saved computation.

    A checkpoint owns the blocks from the one before it, and what the extra group needs to go on from it. One that
    others branch from stays; one with a single successor gives its extra pages up and its blocks to the successor.

    Args:
        shape: the model.
        capacity_bytes: of the pool.
        alpha: weight of saved computation.
    """

    shape: CacheShape
    capacity_bytes: int
    alpha: float
    used_bytes: int = 0
    now: int = 0
    tree: Tree = field(default_factory=Tree)
    _points: dict[int, _Checkpoint] = field(default_factory=dict)
    _pages: dict[tuple[int, int], int] = field(default_factory=dict)  # (group, node) -> checkpoints that need it

    def run(self, request: TracedRequest) -> int:
        """Take one request from admission to its end; return its cached tokens."""
        self.now += 1
        path = self.tree.path(request.token_ids[:-1])
        last = (request.num_prompt - 1) // BLOCK_TOKENS
        known = next((i for i, node in enumerate(path) if (FULL, node) not in self._pages), len(path))
        found = [block + 1 for block in range(min(known, last)) if path[block] in self._points]
        hit = found[-1] if found else 0
        if hit:
            self._points[path[hit - 1]].last_use = self.now
        protected = set(path)
        for end in sorted({known if hit < known <= last else len(path), len(path)}):
            self._add(path[:end], protected)
        return hit * BLOCK_TOKENS

    def _add(self, path: list[int], protected: set[int]) -> None:
        if path[-1] in self._points:
            self._points[path[-1]].last_use = self.now
            return
        pages = self._pages_of(path)
        size = sum(self._bytes(page) for page in pages if page not in self._pages)
        while self.used_bytes + size > self.capacity_bytes and self._evict(protected):
            size = sum(self._bytes(page) for page in pages if page not in self._pages)
        if self.used_bytes + size > self.capacity_bytes:
            return
        parent = next((node for node in reversed(path[:-1]) if node in self._points), 0)
        for point in self._points.values():  # a branch point slips in before the successors of its parent
            if point.parent == parent and len(point.path) > len(path) and point.path[len(path) - 1] == path[-1]:
                point.parent = path[-1]
        self._points[path[-1]] = _Checkpoint(path, parent, self.now)
        for page in pages:
            self.used_bytes += self._bytes(page) if page not in self._pages else 0
            self._pages[page] = self._pages.get(page, 0) + 1
        self._count_children()

    def _count_children(self) -> None:
        for point in self._points.values():
            point.children = 0
        for point in self._points.values():
            if point.parent:
                self._points[point.parent].children += 1

    def _evict(self, protected: set[int]) -> bool:
        candidates = [node for node, p in self._points.items() if p.children <= 1 and node not in protected]
        if not candidates:
            return False
        points = [self._points[node] for node in candidates]
        starts = [len(self._points[point.parent].path) if point.parent else 0 for point in points]
        saved = [
            self.shape.flops(start, len(point.path)) / self.shape.span_bytes(start, len(point.path))
            for point, start in zip(points, starts, strict=True)
        ]
        recent = [1 / (self.now - point.last_use + 1) for point in points]
        utility = _scaled(recent) + self.alpha * _scaled(saved)
        self._drop(candidates[int(np.argmin(utility))])
        return True

    def _drop(self, node: int) -> None:
        gone = self._points.pop(node)
        for point in self._points.values():
            if point.parent == node:
                point.parent = gone.parent
        for page in self._pages_of(gone.path):
            self._pages[page] -= 1
            if not self._pages[page]:
                del self._pages[page]
                self.used_bytes -= self._bytes(page)
        self._count_children()

    def _pages_of(self, path: list[int]) -> list[tuple[int, int]]:
        extra = [(EXTRA, path[block]) for block in self.shape.extras(len(path))]
        return [(FULL, node) for node in path] + extra

    def _bytes(self, page: tuple[int, int]) -> int:
        return self.shape.extra_bytes if page[0] == EXTRA else self.shape.full_bytes


def _scaled(values: Iterable[float]) -> np.ndarray:
    array = np.array(list(values))
    return (array - array.min()) / (np.ptp(array) or 1)
