"""Why requests wait: what the last pass lacked for them."""

from scheduler_driver import Engine, full, plan, prompt

NONE = {"capacity": 0, "max_num_seqs": 0, "budget": 0, "preempted": 0}


def waiting(engine: Engine) -> dict[str, int]:
    counts = engine.scheduler.waiting_by_reason()
    assert sum(counts.values()) <= len(engine.scheduler.queues.waiting)
    return counts


def test_nobody_waits_for_anything_before_the_first_pass_nor_when_all_are_in():
    engine = Engine(plan(full(), num_pages=100))
    engine.add(prompt(4), 3)
    assert waiting(engine) == NONE
    engine.step()
    assert waiting(engine) == NONE


def test_requests_beyond_the_rows_wait_for_a_row():
    engine = Engine(plan(full(), num_pages=100), max_num_seqs=2)
    for i in range(5):
        engine.add(prompt(4, start=i), 3)
    engine.step()
    assert waiting(engine) == NONE | {"max_num_seqs": 3}
    engine.run()
    assert waiting(engine) == NONE


def test_requests_beyond_the_pages_wait_for_capacity():
    engine = Engine(plan(full(), num_pages=6))
    for i in range(4):
        engine.add(prompt(17, start=i), 2)
    engine.step()
    assert waiting(engine) == NONE | {"capacity": 3}


def test_requests_beyond_the_steps_tokens_wait_for_the_budget():
    engine = Engine(plan(full(), num_pages=1000), max_num_batched_tokens=8)
    for length in (2, 1, 1, 1, 1, 1, 1, 5):
        engine.add(prompt(length, start=length), 2)
    engine.step()
    assert waiting(engine) == NONE | {"budget": 1}


def test_a_prompt_behind_as_many_as_may_be_in_progress_waits_for_the_budget():
    engine = Engine(plan(full(), num_pages=4000), max_num_batched_tokens=64)
    for i in range(6):
        engine.add(prompt(1500, start=i), 2)
    for _ in range(3):
        engine.step()
    assert waiting(engine) == NONE | {"budget": 2}


def test_who_lost_its_pages_waits_as_preempted_and_who_is_behind_it_for_capacity():
    engine = Engine(plan(full(), num_pages=8))
    first, second = engine.add(prompt(8), 16), engine.add(prompt(12, start=3), 8)
    while not second.num_preemptions:
        engine.step()
    assert first.row is not None
    assert waiting(engine) == NONE | {"preempted": 1}
    engine.add(prompt(4, start=7), 1)
    assert waiting(engine) == NONE | {"preempted": 1}  # no pass has looked at the new one yet
    engine.step()
    assert waiting(engine) == NONE | {"preempted": 1, "capacity": 1}
    engine.run().assert_all_as_alone()
