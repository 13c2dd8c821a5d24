"""Sampled tokens reach the batch before a step needs them, and no step waits for those that it does not need."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from girih.worker.token_exchange import TokenExchange


class OneOfMany:
    """A worker that does not sample; `arrived` are the tokens of each broadcast, in order."""

    def __init__(self, samples=False):
        self.place = SimpleNamespace(samples=samples, world_size=2, num_stages=2)
        self.arrived, self.waited, self.sent = [], 0, []

    def start_broadcast(self, x):
        self.sent.append(x)
        return self

    def wait(self):
        self.waited += 1
        return torch.tensor(self.arrived.pop(0), dtype=torch.int32)


@pytest.fixture
def batch():
    appended = []
    return SimpleNamespace(
        append=lambda rows, token_ids: appended.extend(zip(rows.tolist(), token_ids.tolist(), strict=True)),
        appended=appended,
    )


def rows(*numbers):
    return np.array(numbers, np.int32)


def step(computed=(), new=()):
    return SimpleNamespace(rows=rows(*computed), new_rows=[SimpleNamespace(row=row) for row in new])


def test_a_step_waits_for_the_tokens_of_its_rows_only(batch):
    ranks = OneOfMany()
    exchange = TokenExchange(ranks, batch)
    ranks.arrived = [[50, -1], [60], [70]]
    exchange.receive(rows(0, 1))
    exchange.receive(rows())  # nobody samples
    exchange.receive(rows(2))
    exchange.receive(rows(3))
    exchange.await_for(step([4, 5]))
    exchange.await_for(step())
    assert ranks.waited == 0
    exchange.await_for(step([2, 4]))
    assert batch.appended == [(0, 50), (2, 60)]  # row 1 failed; in order, and no further
    exchange.await_for(step([0, 1, 2]))
    assert ranks.waited == 2


def test_a_row_gets_its_last_token_before_it_is_another_request_s(batch):
    ranks = OneOfMany()
    exchange = TokenExchange(ranks, batch)
    ranks.arrived = [[50]]
    exchange.receive(rows(7))
    exchange.await_for(step([1], new=[7]))
    assert batch.appended == [(7, 50)]


def test_the_worker_that_samples_sends_and_keeps_few_in_flight(batch):
    ranks = OneOfMany(samples=True)
    exchange = TokenExchange(ranks, batch)
    ranks.arrived = [[0]] * 6
    for token in range(10):
        exchange.send(rows(0, 3), rows(token, -1))
        exchange.await_for(step([0, 3]))
    assert batch.appended == [(0, token) for token in range(10)]
    assert [x.tolist() for x in ranks.sent] == [[token, -1] for token in range(10)]
    assert ranks.waited == 6
