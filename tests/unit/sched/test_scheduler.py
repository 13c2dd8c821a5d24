"""The scheduler with the real cache manager: budgets, fairness, preemption, refusal, and right results throughout."""

import pytest
from fake_worker import VOCAB_SIZE, expected_output
from scheduler_driver import BLOCK, Engine, Result, collect, full, plan, plan_stages, prompt, sliding, state

from girih.kv.config import KVCacheConfig
from girih.sched.request_state import RequestState


@pytest.mark.parametrize("budget", range(1, 18))
def test_every_chunk_size_gives_the_same_tokens(budget):
    engine = Engine(plan(full(), sliding(6), num_pages=64), max_num_batched_tokens=budget)
    engine.add(prompt(37), 9)
    engine.run().assert_all_as_alone()


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_a_batch_gives_each_request_what_it_gets_alone(length):
    engine = Engine(plan(full(), sliding(8), num_pages=200))
    for i in range(12):
        engine.add(prompt(length + i, start=i), 5 + i)
    engine.run().assert_all_as_alone()
    engine.assert_nothing_held()


@pytest.mark.parametrize("ending", ["length", "stop"])
def test_the_slot_of_the_last_step_is_freed_once(ending):  # case 66
    engine = Engine(plan(full(), num_pages=300, block_size=1), max_num_batched_tokens=4)
    output = expected_output(prompt(3), 200)
    eos = (
        () if ending == "length" else (next(t for t in range(VOCAB_SIZE) if t in output[50:] and t not in output[:50]),)
    )
    request = engine.add(prompt(3), 200, eos=eos)
    engine.run()
    assert engine.finish(request) == ending
    engine.assert_nothing_held()
    assert engine.manager.num_computed_tokens.max() == 0


def test_an_explicit_stop_token_is_named_and_an_end_of_sequence_is_not():
    output = expected_output(prompt(5), 8)
    engine = Engine(plan(full(), num_pages=64))
    stopped = engine.add(prompt(5), 8, stop_token_ids=[output[3]])
    ended = engine.add(prompt(5), 8, eos=[output[3]])
    engine.run()
    cut = output[: output.index(output[3]) + 1]
    assert engine.tokens(stopped) == engine.tokens(ended) == cut
    assert engine.result(stopped).stop_reason == output[3]
    assert engine.result(ended).stop_reason is None


def test_a_long_prompt_neither_stops_decodes_nor_keeps_a_short_prompt_waiting():  # case 86
    engine = Engine(plan(full(), num_pages=1000), max_num_batched_tokens=64)
    decoding = engine.add(prompt(8), 100)
    engine.step()
    long = engine.add(prompt(2000, start=1), 2)
    engine.step()
    engine.step()
    short = engine.add(prompt(10, start=2), 2)
    steps_until_first_token = 0
    while not engine.tokens(short):
        before = len(engine.tokens(decoding))
        engine.step()
        steps_until_first_token += 1
        assert len(engine.tokens(decoding)) == before + 1
    assert steps_until_first_token <= 2
    assert not engine.tokens(long)
    engine.run().assert_all_as_alone()


def test_a_short_prompt_goes_before_long_ones_that_wait_for_others_to_finish():  # case 86
    engine = Engine(plan(full(), num_pages=4000), max_num_batched_tokens=64)
    long = [engine.add(prompt(1500, start=i), 2) for i in range(6)]
    for _ in range(3):
        engine.step()
    assert [request.row is None for request in long] == [False] * 4 + [True] * 2
    short = engine.add(prompt(10, start=50), 2)
    engine.step()
    assert engine.tokens(short)
    assert long[4].row is None


def test_the_first_that_waits_is_passed_by_a_bounded_number_of_short_prompts(monkeypatch):
    monkeypatch.setattr("girih.sched.batch.MAX_TIMES_PASSED", 3)
    engine = Engine(plan(full(), num_pages=1000), max_num_seqs=16, max_num_batched_tokens=40)
    long = [engine.add(prompt(100, start=i), 2) for i in range(5)]
    engine.step()
    short = [engine.add(prompt(5, start=20 + i), 2) for i in range(6)]
    while long[4].row is None:
        before = [request for request in short if request.num_cached_tokens is not None]
        engine.step()
    assert before == short[:3]
    engine.run().assert_all_as_alone()


def test_a_long_prompt_is_short_if_little_of_it_is_not_cached():
    engine = Engine(plan(full(), num_pages=1000), max_num_batched_tokens=40)
    for i in range(4):
        engine.add(prompt(300, start=i), 2)
    for _ in range(5):
        engine.step()
    beginning = prompt(300)[: int(engine.manager.num_computed_tokens[0]) // BLOCK * BLOCK]
    similar = engine.add([*beginning, 3, 2, 1], 2)
    assert len(beginning) > 40
    engine.step()
    assert similar.num_cached_tokens == len(beginning)
    assert len(engine.tokens(similar)) == 1


def test_pages_shared_with_a_prompt_in_progress_are_counted_once():
    engine = Engine(plan(full(), num_pages=24), max_num_batched_tokens=8)
    first = engine.add(prompt(80), 2)  # 21 pages in the end
    for _ in range(5):
        engine.step()
    second = engine.add([*prompt(80)[:36], 5], 2)  # 9 of the first one's, and 1 of its own
    engine.step()
    assert second.num_cached_tokens == 36
    engine.run().assert_all_as_alone()
    assert first.num_preemptions == 0


def test_the_last_block_of_a_prompt_is_found_also_if_its_last_token_was_computed_alone():
    engine = Engine(plan(full(), num_pages=32), max_num_batched_tokens=7)
    engine.add(prompt(8), 1)
    assert [engine.step().num_scheduled_tokens.tolist() for _ in range(2)] == [[7], [1]]
    longer = engine.add([*prompt(8), 1, 2, 3], 2)
    engine.run().assert_all_as_alone()
    assert longer.num_cached_tokens == 8


def test_a_prompt_is_shared_in_the_step_that_computes_its_last_token_alone():
    engine = Engine(plan(full(), num_pages=32), max_num_batched_tokens=7)
    engine.add(prompt(8), 1)
    engine.step()
    longer = engine.add([*prompt(8), 1, 2, 3], 2)
    assert engine.step().num_scheduled_tokens.tolist() == [1, 3]
    assert longer.num_cached_tokens == 8
    engine.run().assert_all_as_alone()


def test_a_budget_is_not_left_unused_while_a_prompt_waits_for_pages():
    engine = Engine(plan(full(), num_pages=30), max_num_batched_tokens=16)
    engine.add(prompt(100), 2)
    engine.add(prompt(100, start=1), 2)  # does not fit beside the first
    steps = [engine.step().num_scheduled_tokens.sum() for _ in range(6)]
    assert steps == [16] * 6


def test_a_prompt_in_progress_keeps_the_pages_it_was_admitted_for():
    engine = Engine(plan(full(), num_pages=50), max_num_batched_tokens=16)
    for i in range(4):
        engine.add(prompt(120, start=i), 2)
    engine.run().assert_all_as_alone()
    assert engine.scheduler.queues.num_preemptions == 0


def test_each_running_request_gets_a_token_in_every_step_however_small_the_budget():
    engine = Engine(plan(full(), num_pages=300), max_num_seqs=8, max_num_batched_tokens=3)
    for i in range(6):
        engine.add(prompt(5, start=i), 6)
    while engine.scheduler.has_unfinished():
        decoding = [r for r in engine.scheduler.queues.running if engine.tokens(r)]
        step = engine.step()
        assert {r.row for r in decoding if r.row is not None} <= set(step.rows.tolist())
    engine.assert_all_as_alone()


def test_requests_of_one_step_share_their_prefix():
    engine = Engine(plan(full(), sliding(8), num_pages=100))
    first, second = engine.add(prompt(21), 3), engine.add([*prompt(21)[:20], 5], 3)
    step = engine.step()
    assert sorted(step.num_scheduled_tokens.tolist()) == [1, 21]
    engine.run().assert_all_as_alone()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 20)


@pytest.mark.parametrize("length", [4, 8, 9, 12])
def test_a_repeated_prompt_computes_at_least_its_last_token(length):  # case 37
    engine = Engine(plan(full(), num_pages=32))
    engine.add(prompt(length), 3)
    engine.run()
    again = engine.add(prompt(length), 3)
    engine.run().assert_all_as_alone()
    assert again.num_cached_tokens == (length - 1) // BLOCK * BLOCK


def test_only_equal_salts_share():  # case 53
    engine = Engine(plan(full(), num_pages=64))
    salts = ["", "a", "a", "b", ""]
    hits = []
    for salt in salts:
        hits.append(engine.add(prompt(17), 2, salt=salt))
        engine.run()
    assert [request.num_cached_tokens for request in hits] == [0, 0, 16, 0, 16]


def test_prompt_log_probabilities_are_computed_whole_although_the_prefix_is_cached():
    engine = Engine(plan(full(), num_pages=64), max_num_batched_tokens=7)
    engine.add(prompt(20), 2)
    engine.run()
    request = engine.add(prompt(20), 2, prompt_logprobs=0)
    engine.run()
    assert request.num_cached_tokens == 0
    assert engine.result(request).prompt_token_ids == prompt(20)[1:]


def test_prompt_log_probabilities_are_reported_once_after_a_preemption():
    engine = Engine(plan(full(), num_pages=16), max_num_batched_tokens=8)
    engine.add(prompt(4), 40)
    request = engine.add(prompt(20, start=1), 30, prompt_logprobs=0)
    engine.run().assert_all_as_alone()
    assert request.num_preemptions > 0
    assert engine.result(request).prompt_token_ids == prompt(20, start=1)[1:]


def test_a_model_without_any_cache_is_limited_by_sequences_only():  # case 105
    engine = Engine(KVCacheConfig(0, 0, (), max_model_len=64), max_num_seqs=2)
    for i in range(5):
        engine.add(prompt(9, start=i), 4)
    engine.step()
    assert len(engine.scheduler.queues.running) == 2
    engine.run().assert_all_as_alone()


def test_abort_frees_a_running_and_a_waiting_request_at_once():
    engine = Engine(plan(full(), num_pages=64), max_num_seqs=1)
    running, waiting = engine.add(prompt(9), 50), engine.add(prompt(9, start=1), 5)
    engine.step()
    assert engine.scheduler.abort(waiting.request_id)
    assert engine.scheduler.abort(running.request_id)
    assert not engine.scheduler.abort(running.request_id)
    assert not engine.scheduler.has_unfinished()
    engine.assert_nothing_held()
    assert engine.scheduler.schedule() is None


def test_a_failed_step_ends_the_running_requests_forgets_the_cache_and_spares_the_waiting():
    engine = Engine(plan(full(), num_pages=64), max_num_seqs=1)
    running, waiting = engine.add(prompt(9), 5), engine.add(prompt(9), 5)
    engine.scheduler.schedule()
    engine.scheduler.fail_running("the device is gone")
    results = collect(engine.scheduler.take_updates(), {})
    assert results == {running.request_id: Result(finish_reason="error", error="the device is gone")}
    engine.run()
    assert engine.finish(waiting) == "length"
    assert waiting.num_cached_tokens == 0
    assert engine.tokens(waiting) == expected_output(prompt(9), 5)


def test_when_no_more_steps_can_be_made_every_request_is_told():
    engine = Engine(plan(full(), num_pages=64), max_num_seqs=1)
    for i in range(3):
        engine.add(prompt(9, start=i), 5)
    engine.step()
    engine.scheduler.fail_all("dead")
    results = collect(engine.scheduler.take_updates(), {})
    assert [result.error for result in results.values()] == ["dead"] * 3
    assert not engine.scheduler.has_unfinished()


def test_a_step_of_decodes_looks_at_no_request(monkeypatch):
    engine = Engine(plan(full(), sliding(6), num_pages=200))
    for i in range(8):
        engine.add(prompt(9 + i, start=i), 30, stop_token_ids=[VOCAB_SIZE + 1])
    for _ in range(4):
        engine.step()
    queues = engine.scheduler.queues
    looks = []
    with monkeypatch.context() as patch:
        for name in ("request_id", "row", "output_token_ids", "max_output_tokens", "sampling_params"):
            patch.setattr(RequestState, name, property(lambda _, name=name: looks.append(name)), raising=False)
        step = engine.scheduler.schedule()
        engine.scheduler.update(step, engine.worker.execute_model(step))
    assert step.rows.tolist() == queues.running_rows().tolist()
    assert looks == []
    engine.run().assert_all_as_alone()


def test_steps_that_were_not_asked_about_are_reported_one_by_one():
    engine = Engine(plan(full(), num_pages=64))
    requests = [engine.add(prompt(9, start=i), 3) for i in range(2)]
    for _ in range(3):
        step = engine.scheduler.schedule()
        engine.scheduler.update(step, engine.worker.execute_model(step))
    assert not engine.scheduler.abort(requests[0].request_id)  # it has ended; nobody is told any more
    updates = engine.scheduler.take_updates()
    assert [update.request_ids for update in updates] == [[requests[1].request_id]] * 3
    assert collect(updates, {})[requests[1].request_id].tokens == expected_output(prompt(9, start=1), 3)
    assert engine.scheduler.take_updates() == []


def test_pipeline_stages_with_other_layers_share_rows_and_tokens():
    stages = ([full(), sliding(6)], [state()], [full(2)] * 3)
    configs = plan_stages(*stages, num_pages=60, model_limit=400)
    assert len(configs) > 1
    engine = Engine(configs)
    for i in range(6):
        engine.add(prompt(5 + 9 * i, start=i % 2), 12)
    engine.run().assert_all_as_alone()
    engine.assert_nothing_held()


def test_the_next_turn_of_a_chat_starts_at_the_exact_token():
    engine = Engine(plan(full(), sliding(6), state(), num_pages=100))
    engine.add(prompt(10), 5)
    engine.run()
    said = [*prompt(10), *expected_output(prompt(10), 5)]
    turn = engine.add([*said, 1, 2, 3], 5)
    engine.run().assert_all_as_alone()
    assert turn.num_cached_tokens == len(said) - 1  # nobody has computed the last one
