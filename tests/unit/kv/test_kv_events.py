"""What the manager tells of its prefix cache, against what a prompt finds there."""

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant
from kv_driver import KVDriver, evict_page, listed_pages, make_config
from manager_machine import ManagerMachine

from girih.kv import event_log
from girih.kv.specs.full_attention import FullAttentionRetention
from girih.kv.specs.sliding_window import SlidingWindowRetention
from girih.kv.specs.state import StateRetention

FULL, WINDOW, STATE = FullAttentionRetention(), SlidingWindowRetention(9), StateRetention()


class Listener:
    """Knows of a prefix cache only what it was told."""

    def __init__(self, manager):
        self.manager = manager
        self.units = {}
        """(group, key) -> whether it is private."""
        self.num_told = self.num_cleared = 0

    def listen(self):
        events = self.manager.take_events()
        if events.is_cleared:
            self.units.clear()
            self.num_cleared += 1
        for i, group in enumerate(events.groups.tolist()):
            key = group, tuple(events.keys[i].tolist())
            self.num_told += 1
            if events.is_removed[i]:
                self.units.pop(key, None)
                assert not events.token_ids[i].any()
                continue
            self.units[key] = bool(events.is_private[i])
            if events.is_private[i]:
                assert not events.token_ids[i].any()
            else:  # a key is the hash of the one before it and the unit's tokens
                made = self.manager._hasher.chain(events.parents[i], events.token_ids[i])
                assert made.tolist() == [events.keys[i].tolist()]
            is_first = events.parents[i].tolist() == self.manager._hasher.root("").tolist()
            assert events.is_private[i] or is_first == (events.depths[i] == 1)
        return events

    def keys(self, tokens, salt=""):
        hasher = self.manager._hasher
        return [tuple(key) for key in hasher.chain(hasher.root(salt), np.array(tokens, dtype=np.int32)).tolist()]

    def hit(self, tokens, salt=""):
        """What `lookup` must say of a prompt, but for tails: they are not told."""
        unit, groups = self.manager.unit, range(len(self.manager.groups))
        keys = self.keys(tokens, salt)[: (len(tokens) - 1) // unit]
        while keys and not any((group, keys[-1]) in self.units for group in groups):
            keys.pop()
        return next((b * unit for b in range(len(keys), 0, -1) if self._may_go_on(keys, b)), 0)

    def _may_go_on(self, keys, boundary):
        unit = self.manager.unit
        for group, spec in enumerate(self.manager.groups):
            kept = spec.retention
            first, end = kept.hit_first(boundary * unit, unit), boundary + (kept.hit_trim_tokens > 0)
            if end > len(keys) or not all(self._has(group, keys, i) for i in range(first, end)):
                return False
        return True

    def _has(self, group, keys, i):
        """Whether a group has a unit, perhaps by a later unit of the same block."""
        spec = self.manager.groups[group]
        if (group, keys[i]) in self.units:
            return True
        per_block = spec.block_size // self.manager.unit
        return not spec.retention.holds_state and any(
            (group, keys[j]) in self.units for j in range(i + 1, min(len(keys), (i // per_block + 1) * per_block))
        )


class WatchedDriver(KVDriver):
    """Remembers every sequence that there was."""

    def __init__(self, *args, **options):
        self.sequences = {}
        super().__init__(*args, log_events=True, **options)
        self.listener = Listener(self.manager)

    def _verify(self):
        for row, tokens in self.rows.items():
            self.sequences[self.salts[row], tuple(tokens)] = None
        super()._verify()


def verify(driver: WatchedDriver) -> None:
    """Compare what was told with what every sequence finds, unit by unit and as a whole."""
    manager, listener = driver.manager, driver.listener
    listener.listen()
    known = {}
    for salt, tokens in driver.sequences:
        keys, pages = listener.keys(tokens, salt), listed_pages(manager, tokens, salt)
        for unit, key in enumerate(keys):
            known[key] = salt != ""
            for group in range(len(manager.groups)):
                assert ((group, key) in listener.units) == (pages[unit, group] != 0)
        hit, told = manager.lookup(np.array(tokens, dtype=np.int32), salt), listener.hit(tokens, salt)
        assert hit == told or (hit > told and hit % manager.unit != 0), "a tail ends inside a unit"
    for (_, key), is_private in listener.units.items():
        assert known[key] == is_private


class EventMachine(ManagerMachine):
    make_driver = WatchedDriver

    @invariant()
    def a_listener_knows_what_can_be_found(self):
        if self.calls % 3 == 0:
            verify(self.driver)

    def teardown(self):
        verify(self.driver)
        super().teardown()
        assert self.driver.listener.listen().is_cleared
        assert not self.driver.listener.units


class TestEvents(EventMachine.TestCase):
    settings = settings(
        max_examples=100, stateful_step_count=20, derandomize=True, phases=[Phase.explicit, Phase.generate],
        deadline=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def make(*groups, num_slabs=12, **options):
    return WatchedDriver(make_config(num_slabs, groups), **options)


def test_the_first_events_of_a_manager_say_that_all_is_cleared_and_the_next_nothing():
    driver = make((FULL, 2))
    assert driver.listener.listen().is_cleared
    assert not driver.manager.take_events()


def test_a_prompts_units_are_told_when_they_are_scheduled_parents_first():
    driver = make((FULL, 2))
    driver.listener.listen()
    driver.add(range(10, 20))
    driver.step()
    events = driver.manager.take_events()
    assert not events.is_cleared
    assert events.token_ids.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert events.depths.tolist() == [1, 2]
    assert events.parents[1].tolist() == events.keys[0].tolist()
    assert not events.is_removed.any()
    for _ in range(3):
        driver.step()
    assert driver.manager.take_events().token_ids.tolist() == [[18, 19, 0, 0]]  # with tokens that were sampled


def test_each_group_is_told_by_itself():
    driver = make((FULL, 2), (STATE, 1))
    driver.run(range(9), num_new=4)
    events = driver.listener.listen()
    told = {(group, depth) for group, depth in zip(events.groups.tolist(), events.depths.tolist(), strict=True)}
    assert told == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)}  # states: behind the prompt's last unit and at the end


def test_what_is_evicted_is_told_to_be_gone_in_its_group_alone():
    driver = make((FULL, 2), (WINDOW, 2))
    driver.run(range(12))
    driver.listener.listen()
    page = int(listed_pages(driver.manager, range(12))[2, 1])
    evict_page(driver.manager, 1, page)
    events = driver.listener.listen()
    assert (events.is_removed.tolist(), events.groups.tolist()) == ([True], [1])
    assert (0, driver.listener.keys(range(12))[2]) in driver.listener.units
    verify(driver)


def test_a_page_that_moves_is_no_event():
    driver = make((FULL, 3), num_slabs=5)
    for i in range(4):
        driver.run(range(100 * i, 100 * i + 9))
    driver.listener.listen()
    for first in (0, 100, 200):
        evict_page(driver.manager, 0, int(listed_pages(driver.manager, range(first, first + 9))[0, 0]))
    driver.listener.listen()
    before = driver.manager.stats().pages_moved
    driver.manager.resize(3)
    assert driver.manager.stats().pages_moved > before
    assert not driver.manager.take_events()
    verify(driver)


def test_forgetting_everything_is_one_event():
    driver = make((FULL, 2))
    driver.run(range(12))
    driver.listener.listen()
    assert driver.manager.reset_prefix_cache()
    events = driver.manager.take_events()
    assert events.is_cleared
    assert len(events.groups) == 0


def test_a_salted_request_is_told_without_its_tokens():
    driver = make((FULL, 2))
    driver.listener.listen()
    driver.run(range(12), salt="a secret")
    driver.run(range(12))
    events = driver.manager.take_events()
    assert events.is_private.tolist() == [True] * 3 + [False] * 3
    assert not events.token_ids[:3].any()
    assert events.token_ids[3:].reshape(-1).tolist() == [*range(12)]
    assert not {*map(tuple, events.keys[:3].tolist())} & {*map(tuple, events.keys[3:].tolist())}


@pytest.mark.parametrize(("max_records", "listens"), [(1, True), (7, True), (7, False)])
def test_more_events_than_there_is_room_for_are_told_anew(monkeypatch, max_records, listens):
    monkeypatch.setattr(event_log, "MAX_RECORDS", max_records)
    driver = make((FULL, 2), (STATE, 1), (WINDOW, 2))
    driver.listener.listen()
    for i in range(8):
        driver.run(range(50 * i, 50 * i + 20))
        if listens:
            verify(driver)
    verify(driver)
    assert driver.listener.num_cleared > 1
    assert driver.manager.stats().pages_evicted > 0


def test_nothing_is_kept_where_nobody_asks():
    driver = KVDriver(make_config(12, [(FULL, 2)]))
    driver.run(range(12))
    log = driver.manager._state.log
    assert not driver.manager.take_events()
    assert log.records.size == log.token_ids.size == log.row_tokens.size == log.parents.size == 0
