"""The scheduler when memory is short: who gives way, who is refused, and that everybody else finishes right."""

import dataclasses

import pytest
from scheduler_driver import Engine, collect, full, plan, prompt, sliding

from girih.errors import CapacityError, RequestError
from girih.sched.policies import priority


def test_a_pool_that_holds_a_quarter_finishes_everything_right_and_the_oldest_is_never_preempted():
    engine = Engine(plan(full(), sliding(12), num_pages=120), max_num_seqs=64, max_num_batched_tokens=48)
    for i in range(64):
        engine.add(prompt(3 + 7 * i % 41, start=i), 5 + 11 * i % 37)
    engine.run().assert_all_as_alone()
    engine.assert_nothing_held()
    assert engine.scheduler.queues.num_preemptions > 0
    assert engine.requests["0"].num_preemptions == 0


def test_a_resumed_request_finds_its_own_blocks_again():  # case 38
    engine = Engine(plan(full(), num_pages=8))
    first, second = engine.add(prompt(8), 16), engine.add(prompt(12, start=3), 8)
    engine.run().assert_all_as_alone()
    assert (first.num_preemptions, second.num_preemptions > 0) == (0, True)
    assert engine.manager.stats().tokens_hit > 0
    assert second.num_cached_tokens == 0  # as when it first ran


def test_the_newest_gives_way_first():
    engine = Engine(plan(full(), num_pages=12))
    requests = [engine.add(prompt(8, start=i), 24) for i in range(4)]
    engine.run().assert_all_as_alone()
    preemptions = [request.num_preemptions for request in requests]
    assert preemptions[0] == 0
    assert preemptions[-1] > 0


def test_of_two_that_need_the_last_page_the_more_important_gets_it():  # case 67
    engine = Engine(plan(full(), num_pages=5), policy=priority)
    less = engine.add(prompt(8), 8, priority=1)
    more = engine.add(prompt(8, start=1), 8, priority=0)
    while more.row is None or engine.manager.num_computed_tokens[more.row] < 8:
        engine.step()
    assert less.row is not None
    step = engine.step()
    assert more.row in step.rows.tolist()
    assert len(step.cache.tables[0].rows) == 1
    while less.row is not None:
        row = less.row
        step = engine.step()
    assert step.rows.tolist() == [more.row]  # what was granted to the other is gone, in every list
    assert step.new_rows == ()
    update = step.cache.tables[0]
    assert set(update.block_ids[update.rows == row].tolist()) <= {engine.worker.null_ids[0]}
    engine.run().assert_all_as_alone()
    assert (more.num_preemptions, less.num_preemptions > 0) == (0, True)


def test_priority_decides_who_is_admitted_first():
    engine = Engine(plan(full(), num_pages=100), max_num_seqs=1, policy=priority)
    order = {p: engine.add(prompt(4, start=p), 1, priority=p) for p in (3, 1, 2)}
    finished = []
    while engine.scheduler.has_unfinished():
        engine.step()
        finished += [p for p, request in order.items() if engine.tokens(request) and p not in finished]
    assert finished == [1, 2, 3]


def test_nobody_is_passed_over():
    engine = Engine(plan(full(), num_pages=20), max_num_batched_tokens=32)
    requests = [engine.add(prompt(length, start=length), 3) for length in (40, 60, 4, 70, 4, 4)]
    admitted = []
    while engine.scheduler.has_unfinished():
        engine.step()
        admitted += [r for r in requests if r.num_cached_tokens is not None and r not in admitted]
    assert admitted == requests
    engine.assert_all_as_alone()


def test_a_request_that_does_not_fit_now_stays_queued():  # case 77
    engine = Engine(plan(full(), num_pages=10))
    first = engine.add(prompt(36), 3)
    second = engine.add(prompt(36, start=1), 3)
    engine.step()
    assert (first.row is None, second.row is None) == (False, True)
    engine.run().assert_all_as_alone()


def test_a_prompt_longer_than_the_pool_is_refused_at_once_and_the_next_runs():  # case 78
    config = dataclasses.replace(plan(full(), num_pages=100, block_size=16), max_model_len=4096)
    engine = Engine(config)
    with pytest.raises(RequestError, match=r"2000 tokens .* 1600 tokens"):
        engine.add(prompt(2000))
    engine.add(prompt(10), 3)
    engine.run().assert_all_as_alone()


@pytest.mark.parametrize(("length", "max_tokens", "num_output"), [(62, None, 2), (63, None, 1), (63, 2, 1), (62, 1, 1)])
def test_output_is_cut_to_the_longest_request(length, max_tokens, num_output):  # case 109
    engine = Engine(plan(full(), num_pages=64, max_model_len=64))
    request = engine.add(prompt(length), max_tokens)
    engine.run()
    assert (len(engine.tokens(request)), engine.finish(request)) == (num_output, "length")


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_without_room_for_one_token_is_refused_with_both_numbers(length):  # case 109
    engine = Engine(plan(full(), num_pages=64, max_model_len=64))
    with pytest.raises(RequestError, match=rf"{length} tokens .* 64 tokens"):
        engine.add(prompt(length))
    assert not engine.scheduler.has_unfinished()


def test_a_request_that_fills_the_pool_finishes_and_the_engine_lives():  # case 83
    engine = Engine(plan(full(), num_pages=2))
    assert engine.scheduler.max_request_tokens == 8
    engine.add(prompt(7), 100)
    engine.run().assert_all_as_alone()
    with pytest.raises(RequestError):
        engine.add(prompt(8), 1)
    engine.add(prompt(3, start=1), 3)
    engine.run().assert_all_as_alone()


def test_a_window_lets_a_long_prompt_through_a_small_pool():  # case 85
    engine = Engine(plan(sliding(8), num_pages=13, model_limit=400), max_num_batched_tokens=32)
    engine.add(prompt(200), 5)
    engine.run().assert_all_as_alone()


def test_what_start_up_accepts_is_admitted_and_finishes():  # case 79
    specs = (full(), sliding(64))
    needed = next(n for n in range(70, 400) if plan_or_none(*specs, num_pages=n, max_model_len=1024))
    engine = Engine(plan(*specs, num_pages=needed, block_size=16, max_model_len=1024), max_num_batched_tokens=64)
    engine.add(prompt(1000), None)
    most = 0
    while engine.scheduler.has_unfinished():
        step = engine.scheduler.schedule()
        most = max(most, sum(engine.manager.stats().referenced_pages))
        engine.scheduler.update(step, engine.worker.execute_model(step))
    (result,) = collect(engine.scheduler.take_updates(), {}).values()
    assert (result.finish_reason, len(result.tokens)) == ("length", 24)
    assert needed <= 64 + 9 + 2
    assert most <= 64 + 9


def plan_or_none(*specs, num_pages, max_model_len):
    try:
        return plan(*specs, num_pages=num_pages, block_size=16, max_model_len=max_model_len)
    except CapacityError:
        return None


def test_pages_that_others_left_scattered_do_not_keep_a_long_request_from_its_end():
    engine = Engine(plan(full(), sliding(10, 7), sliding(34), full(), num_pages=41, model_limit=600))
    for length, start, max_tokens, num_steps in ((50, 7, 1000, 1), (156, 12, 8, 5), (173, 11, 1000, 0)):
        engine.add(prompt(length, start=start), max_tokens)
        for _ in range(num_steps):
            engine.step()
    engine.run().assert_all_as_alone()
    assert engine.worker.num_pages_moved > 0


def test_a_request_for_which_the_cache_breaks_its_promise_ends_alone_with_an_error(monkeypatch):
    engine = Engine(plan(full(), num_pages=64))
    request = engine.add(prompt(10), 12)
    monkeypatch.setattr(engine.manager, "max_new_tokens", lambda row, limit: 0)
    engine.step()
    monkeypatch.undo()
    assert engine.finish(request) == "error"
    assert "10 tokens find no room in the KV cache" in engine.result(request).error
    engine.assert_nothing_held()
    after = engine.add(prompt(10), 3)
    engine.run()
    assert engine.finish(after) == "length"


@pytest.mark.parametrize("length", [1000, 1008, 1009, 1024, 4096])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_a_lone_request_of_the_full_length_runs_in_the_smallest_pool_that_start_up_accepts(block_size, length):
    # cases 7 and 8
    specs, options = (full(), sliding(100)), {"block_size": block_size, "max_model_len": length}
    with pytest.raises(CapacityError) as refusal:
        plan(*specs, num_pages=1, **options)
    page_bytes = full().page_size_bytes(block_size)
    needed = -(-refusal.value.need_bytes // page_bytes) - 1
    with pytest.raises(CapacityError):
        plan(*specs, num_pages=needed - 1, **options)
    engine = Engine(plan(*specs, num_pages=needed, **options), max_num_batched_tokens=2048)
    request = engine.add(prompt(length - 3), None)
    engine.run().assert_all_as_alone()
    assert request.num_tokens == length


def test_the_length_that_auto_found_runs():  # case 7
    config = plan(full(), num_pages=7, block_size=128)  # and the null page
    assert config.max_model_len == 896
    engine = Engine(config)
    request = engine.add(prompt(890), 6)
    engine.run().assert_all_as_alone()
    assert request.num_tokens == 896


def test_a_pool_given_by_hand_refuses_a_length_or_each_request_that_does_not_fit():  # case 10
    for num_pages, length in ((49, 1008), (0, 2048)):
        with pytest.raises(CapacityError):
            plan(full(), num_pages=num_pages, block_size=16, max_model_len=length)
    engine = Engine(plan(full(), num_pages=49, block_size=16, model_limit=2048))
    for i in range(5):
        with pytest.raises(RequestError, match=r"1002 tokens .* 784 tokens"):
            engine.add(prompt(1002, start=i))
    assert not engine.scheduler.has_unfinished()
    engine.add(prompt(10), 3)
    engine.run().assert_all_as_alone()


@pytest.mark.parametrize("refused_by", ["can_admit", "max_new_tokens"])
def test_a_request_that_is_not_admitted_and_goes_away_leaves_no_trace(monkeypatch, refused_by):  # case 65
    def counts(with_newcomer):
        engine = Engine(plan(full(), num_pages=20), prefix_caching=True)
        engine.add(prompt(12), 1)
        engine.run()
        running = engine.add(prompt(20, start=1), 30)
        engine.step()
        if with_newcomer:
            refused = engine.add([*prompt(12), *prompt(60 if refused_by == "can_admit" else 4, start=2)], 1)
            assert engine.manager.lookup(refused.known_token_ids()) == 12
        with monkeypatch.context() as patch:
            if refused_by == "max_new_tokens":
                patch.setattr(engine.manager, "max_new_tokens", lambda row, limit: 0)
            for _ in range(10):
                engine.step()
        if with_newcomer:
            assert refused.row is None
            assert engine.scheduler.abort(refused.request_id)
            del engine.requests[refused.request_id]
        stats = engine.manager.stats()
        assert engine.manager.num_running == 1
        engine.run().assert_all_as_alone()
        engine.assert_nothing_held()
        assert len(engine.tokens(running)) == 30
        return stats.free_pages, stats.cached_pages, stats.referenced_pages, stats.num_free_slabs

    assert counts(with_newcomer=True) == counts(with_newcomer=False)


def test_a_need_that_rounds_up_to_one_page_more_than_the_pool_is_refused():  # case 89
    engine = Engine(dataclasses.replace(plan(full(), num_pages=10), max_model_len=100))
    with pytest.raises(RequestError, match=r"40 tokens and one token of output .* 40 tokens"):
        engine.add(prompt(40), 1)
    engine.add(prompt(39), 1)
    engine.run().assert_all_as_alone()


def test_every_restart_of_a_half_computed_prompt_is_counted():  # case 89
    engine = Engine(plan(full(), num_pages=14), max_num_batched_tokens=3)
    engine.add(prompt(4), 40)
    engine.step()
    engine.step()
    request = engine.add(prompt(40, start=1), 2)
    num_restarts = num_half_computed = 0
    while engine.scheduler.has_unfinished():
        row = request.row
        num_computed = 0 if row is None else int(engine.manager.num_computed_tokens[row])
        engine.step()
        if row is not None and request.row is None and len(engine.tokens(request)) < 2:
            num_restarts += 1
            num_half_computed += 0 < num_computed < 40
    assert request.num_preemptions == num_restarts
    assert num_half_computed > 0
    assert engine.scheduler.queues.num_preemptions == num_restarts
    engine.assert_all_as_alone()
