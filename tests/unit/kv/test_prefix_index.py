"""The index is a dictionary from 128-bit keys to pages per group, also where keys want the same slot."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kv.compiled import Record, entry
from girih.kv.index import drop_page, entry_at, find_entry, make_index, slot_of


@entry
def call_add(index, key):
    return entry_at(index, slot_of(index, key[0], key[1]), key[0], key[1])


@entry
def call_find(index, key):
    return find_entry(index, key[0], key[1])


@entry
def call_drop(index, number, group):
    drop_page(index, number, group)


class Index:
    """Pages by key and group; capacity in keys."""

    def __init__(self, capacity, num_groups=2):
        self.state = make_index(capacity, num_groups)
        self.record = Record(self.state)
        self.capacity = capacity

    def list(self, key, group, page):
        self.state.pages[call_add(self.record, as_key(key)), group] = page

    def pages(self, key):
        return self.state.pages[call_find(self.record, as_key(key))].tolist()

    def drop(self, key, group):
        call_drop(self.record, call_find(self.record, as_key(key)), group)

    def __len__(self):
        return self.capacity - int(self.state.counts[0])


def as_key(value):
    return np.array([value, value * 7], dtype=np.uint64)


def test_pages_are_found_by_key_and_group():
    index = Index(8)
    index.list(1, 0, 30)
    index.list(1, 1, 40)
    index.list(2, 0, 50)
    assert [index.pages(key) for key in (2, 9, 1)] == [[50, 0], [0, 0], [30, 40]]
    assert len(index) == 2


def test_half_of_a_key_is_not_enough():
    index = Index(8)
    index.list(1, 0, 30)
    for key in ([1, 8], [2, 7]):
        assert call_find(index.record, np.array(key, dtype=np.uint64)) == 0


def test_an_entry_ends_with_its_last_page():
    index = Index(8)
    index.list(1, 0, 30)
    index.list(1, 1, 40)
    index.drop(1, 0)
    assert (index.pages(1), len(index)) == ([0, 40], 1)
    index.drop(1, 1)
    assert (index.pages(1), len(index)) == ([0, 0], 0)


def test_a_new_entry_knows_no_tail_of_the_one_before_it():
    index = Index(1)
    index.list(1, 0, 30)
    index.state.tails[call_find(index.record, as_key(1))] = 5
    index.drop(1, 0)
    index.list(2, 0, 30)
    assert index.state.tails[call_find(index.record, as_key(2))] == 0


# keys that all want the same few slots, around the end of the table too
colliding = st.builds(lambda low, high: low * 64 + high, st.integers(0, 3), st.sampled_from([0, 1, 61, 62, 63]))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(st.lists(st.tuples(colliding, st.booleans()), max_size=60))
def test_it_is_a_dictionary_also_when_slots_collide(steps):
    index, model, next_page = Index(32, num_groups=1), {}, 1
    for key, insert in steps:
        if insert and key not in model:
            model[key] = next_page
            index.list(key, 0, next_page)
            next_page += 1
        elif not insert and key in model:
            del model[key]
            index.drop(key, 0)
        assert len(index) == len(model)
        assert [index.pages(known)[0] for known in model] == list(model.values())
    assert [index.pages(key)[0] for key in range(256) if key not in model] == [0] * (256 - len(model))
