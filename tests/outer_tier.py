"""A fake store of cache contents outside the pool, as a host tier or another machine would be.

It asks the manager nothing that a request does not ask too: to read, it takes a row, whose references keep the pages;
to write, it fills the pages of a row that was admitted and counts the tokens as computed. What can be used of the store
follows from `Retention.hit_first`, as it does for pages on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from kv_driver import KVDriver, listed_pages

NO_ROWS = np.zeros(0, dtype=np.int64)


class OuterTier:
    """Contents of units, each under its group and all tokens up to its end; a state under those that went into it."""

    def __init__(self) -> None:
        self.contents: dict[tuple[int, tuple[int, ...]], dict[int, tuple]] = {}

    def store(self, driver: KVDriver, tokens: Sequence[int]) -> None:
        """Copy everything that is listed for a prompt."""
        for unit, pages in enumerate(listed_pages(driver.manager, tokens).tolist()):
            for group, page in enumerate(pages):
                if page:
                    number = page - int(driver.manager._pool.first_page[group])
                    self.put(driver, group, tokens, unit, number)

    def put(self, driver: KVDriver, group: int, tokens: Sequence[int], unit: int, page: int) -> None:
        """Copy one unit, or the state behind it, from a page."""
        unit_tokens, spec = driver.manager.unit, driver.groups[group]
        held = driver.memory.pages[group].get(page, {})
        slots = [0]
        if not spec.retention.holds_state:
            slots = [slot % spec.block_size for slot in range(unit * unit_tokens, (unit + 1) * unit_tokens)]
        key = (group, tuple(tokens[: (unit + 1) * unit_tokens]))
        self.contents[key] = {slot: held[slot] for slot in slots if slot in held}

    def usable_tokens(self, driver: KVDriver, tokens: Sequence[int]) -> int:
        """Return the longest prefix in tokens that all groups can go on behind, with a token left to compute."""
        unit_tokens = driver.manager.unit
        for boundary in range((len(tokens) - 1) // unit_tokens, 0, -1):
            if all(
                (group, tuple(tokens[: (unit + 1) * unit_tokens])) in self.contents
                for group, spec in enumerate(driver.groups)
                for unit in range(int(spec.retention.hit_first(boundary * unit_tokens, unit_tokens)), boundary)
            ):
                return boundary * unit_tokens
        return 0


class Load:
    """A prefix on its way from the store into the pages of a row; the row computes nothing meanwhile."""

    def __init__(self, driver: KVDriver, tier: OuterTier, row: int):
        self.driver, self.tier, self.row = driver, tier, row
        self.tokens = driver.rows[row]
        self.num_tokens = tier.usable_tokens(driver, self.tokens)
        start = int(driver.manager.num_computed_tokens[row])
        assert driver.reserve([row], [self.num_tokens - start]) == 1
        self.update = driver.manager.take_cache_update(np.array([row]))
        driver._apply(self.update)

    def complete(self) -> bool:
        """Fill the row's pages and count its tokens; not if the request is gone, whoever has its row now."""
        driver, row = self.driver, self.row
        if driver.rows.get(row) is not self.tokens:
            return False
        for group, spec in enumerate(driver.groups):
            if spec.retention.holds_state:
                content = self.tier.contents[group, tuple(self.tokens[: self.num_tokens])]
                driver.memory.write(group, int(self.update.states[group].state_out[0]), 0, content[0])
                continue
            first = int(spec.retention.hit_first(self.num_tokens, driver.manager.unit))
            for unit in range(first, self.num_tokens // driver.manager.unit):
                end = (unit + 1) * driver.manager.unit
                for slot, value in self.tier.contents[group, tuple(self.tokens[:end])].items():
                    page, _ = driver._slot(group, row, end - 1)
                    driver.memory.write(group, page, slot, value)
        count = self.num_tokens - int(driver.manager.num_computed_tokens[row])
        driver.manager.advance(np.array([row]), np.array([count]))
        driver.manager.publish(np.array([row]), np.array([self.num_tokens]))
        driver.manager.check()
        return True


class Parking:
    """Requests that wait for the store before they ask for a row: they hold nothing, and not for ever.

    Args:
        driver: whose rows they will ask for.
        patience_steps: how long each waits.
    """

    def __init__(self, driver: KVDriver, patience_steps: int):
        self.driver = driver
        self.patience_steps = patience_steps
        self.parked: dict[tuple[int, ...], tuple[Callable[[], bool], int]] = {}
        self.errors: dict[tuple[int, ...], str] = {}

    def park(self, tokens: Sequence[int], is_ready: Callable[[], bool]) -> None:
        """Let a request wait for a condition."""
        self.parked[tuple(tokens)] = is_ready, self.patience_steps

    def step(self) -> None:
        """Admit who is ready and has room, and give up who has waited for too long."""
        for tokens, (is_ready, left) in list(self.parked.items()):
            if left == 0:
                self.errors[tokens] = f"the store has not answered for {self.patience_steps} steps"
            elif not is_ready() or self.driver.add(tokens) is None:
                self.parked[tokens] = is_ready, left - 1
                continue
            del self.parked[tokens]


def store_slowly(driver: KVDriver, tier: OuterTier, tokens: Sequence[int], num_ranks: int, keeps: bool) -> Iterator:
    """Copy a prompt's blocks one by one, once per rank; full attention, a block per unit.

    Args:
        driver: whose cache.
        tier: the store.
        tokens: the prompt; all of it but the last token is cached.
        num_ranks: how often each block is read.
        keeps: whether references are held until all ranks have finished.
    """
    row, num_cached = driver.manager.admit(np.array(tokens), num_prompt_tokens=len(tokens))
    units = num_cached // driver.manager.unit
    rows = np.array([row])
    driver._apply(driver.manager.take_cache_update(rows))
    pages = driver.tables[0][row, :units].copy()
    if not keeps:
        driver.manager.free(row)
    for _ in range(num_ranks):
        for unit in range(units):
            yield
            tier.put(driver, 0, tokens, unit, int(driver.tables[0][row, unit] if keeps else pages[unit]))
    if keeps:
        driver.manager.free(row)
