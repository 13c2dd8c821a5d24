import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kv.prefix import PrefixIndex

NUM_PAGES = 40


def make(capacity=20, num_groups=2):
    tags = np.zeros(NUM_PAGES + 1, dtype=np.int32)
    return PrefixIndex(capacity, num_groups, tags), tags


def keys(*values):
    return np.array([(value, value * 7) for value in values], dtype=np.uint64).reshape(-1, 2)


NO_REFERENCES = np.zeros(NUM_PAGES + 1, dtype=np.int32)


def pages(*rows):
    return np.array(rows, dtype=np.int32)


def evict(index, tags, *numbers):
    evicted = np.array([(number, tags[number]) for number in numbers], dtype=np.int32)
    tags[list(numbers)] = 0
    index.forget(evicted)
    index.check()


def test_published_pages_are_found_by_key_and_group():
    index, tags = make()
    index.publish(keys(1, 2), pages([3, 4], [5, 0]), NO_REFERENCES)
    assert index.find(keys(2, 9, 1)).tolist() == [[5, 0], [0, 0], [3, 4]]
    assert np.flatnonzero(tags).tolist() == [3, 4, 5]
    index.check()


def test_a_second_page_of_a_key_stays_private_while_the_first_is_in_use_and_replaces_it_otherwise():
    index, tags = make()
    references = NO_REFERENCES.copy()
    references[3] = 1
    index.publish(keys(1), pages([3, 4]), references)
    assert index.publish(keys(1), pages([6, 7]), references).tolist() == [[0, 4]]
    assert index.find(keys(1)).tolist() == [[3, 7]]
    assert tags[6] == 0
    evict(index, tags, 4)
    assert index.find(keys(1)).tolist() == [[3, 7]]


def test_a_page_that_is_published_again_is_not_replaced_by_itself():
    index, _ = make()
    for _ in range(2):
        assert index.publish(keys(1), pages([3, 4]), NO_REFERENCES).tolist() == [[0, 0]]
    index.check()


def test_a_block_without_any_page_is_not_published():
    index, _ = make()
    index.publish(keys(1), pages([0, 0]), NO_REFERENCES)
    assert index.num_entries == 0


def test_an_entry_ends_with_its_last_page():
    index, tags = make()
    index.publish(keys(1), pages([3, 4]), NO_REFERENCES)
    evict(index, tags, 3)
    assert index.find(keys(1)).tolist() == [[0, 4]]
    evict(index, tags, 4)
    assert index.find(keys(1)).tolist() == [[0, 0]]
    assert index.num_entries == 0


def test_half_of_a_key_is_not_enough():
    index, _ = make()
    index.publish(np.array([[1, 2]], dtype=np.uint64), pages([3, 4]), NO_REFERENCES)
    assert index.find(np.array([[1, 3], [2, 2]], dtype=np.uint64)).tolist() == [[0, 0], [0, 0]]


# keys that all want the same few slots, around the end of the table too
colliding = st.builds(lambda low, high: low * 64 + high, st.integers(0, 3), st.sampled_from([0, 1, 61, 62, 63]))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(st.lists(st.tuples(colliding, st.booleans()), max_size=60))
def test_it_is_a_dictionary_also_when_slots_collide(steps):
    index, tags = make(capacity=NUM_PAGES, num_groups=1)
    model, free = {}, list(range(1, NUM_PAGES + 1))
    for key, insert in steps:
        if insert and key not in model and free:
            model[key] = free.pop()
            index.publish(keys(key), pages([model[key]]), NO_REFERENCES)
        elif not insert and key in model:
            free.append(model.pop(key))
            evict(index, tags, free[-1])
        assert index.num_entries == len(model)
        assert index.find(keys(*model)).ravel().tolist() == list(model.values())
    index.check()
