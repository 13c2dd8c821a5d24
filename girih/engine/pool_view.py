"""What somebody sees who watches the pool of a running engine: whose each page is, and of which tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from girih.engine.report import EngineStats
from girih.kv.pool_map import ClassMap
from girih.sched.scheduler import Scheduler


@dataclass(frozen=True)
class PoolView:
    """The pool now, and the requests that hold its pages.

    Args:
        stats: what the engine is doing at the same moment.
        classes: the pool of each stage class.
        request_ids: those that run, most important first.
        rows: int32 [requests]; the row of each, by which `classes` name it.
        num_prompt_tokens: int32 [requests].
        num_output_tokens: int32 [requests]; known ones.
        num_computed_tokens: int32 [requests]; of prompt and output, with those of steps under way.
        num_cached_tokens: int32 [requests]; prompt tokens that came from the prefix cache when it first ran.
    """

    stats: EngineStats
    classes: tuple[ClassMap, ...]
    request_ids: tuple[str, ...]
    rows: np.ndarray
    num_prompt_tokens: np.ndarray
    num_output_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    num_cached_tokens: np.ndarray


@dataclass(frozen=True)
class PageHolder:
    """One request that holds a page.

    Args:
        request_id: the request.
        first_token: of its sequence, the first token that the page has something of; for a recurrent state, which has
            something of all tokens up to one, the first of the last few of them.
        end_token: the first token behind that; no token for a page of an encoder.
        token_ids: int32 [n]; these tokens, up to the last one that is known.
    """

    request_id: str
    first_token: int
    end_token: int
    token_ids: np.ndarray


@dataclass(frozen=True)
class PageInfo:
    """What one page is used for. Of a page that only the prefix cache holds the tokens are not known, only their hash.

    Args:
        is_cached: whether a later prompt can find it.
        holders: the requests that hold it.
    """

    is_cached: bool
    holders: tuple[PageHolder, ...]


def view_pool(scheduler: Scheduler, stats: EngineStats) -> PoolView:
    """Return the pool and the running requests of a scheduler, beside what its engine is doing."""
    queues, manager = scheduler.queues, scheduler.manager
    rows = queues.running_rows()
    return PoolView(
        stats=stats,
        classes=manager.pool_map(),
        request_ids=tuple(request.request_id for request in queues.running),
        rows=rows.astype(np.int32),
        num_prompt_tokens=queues.rows.num_prompt[rows],
        num_output_tokens=queues.rows.num_output[rows],
        num_computed_tokens=manager.num_computed_tokens[rows].astype(np.int32),
        num_cached_tokens=np.array([request.num_cached_tokens for request in queues.running], dtype=np.int32),
    )


def describe_page(scheduler: Scheduler, group: int, page: int) -> PageInfo:
    """Return what a page is used for.

    Args:
        scheduler: of the engine.
        group: the group.
        page: the page's id in the group.

    Raises:
        RequestError: there is no such page.
    """
    rows = scheduler.queues.rows
    is_cached, uses = scheduler.manager.find_page(group, page)
    holders = [
        PageHolder(
            rows.request(use.row).request_id,
            use.first_token,
            use.end_token,
            rows.token_ids(use.row, use.first_token, use.end_token),
        )
        for use in uses
    ]
    return PageInfo(is_cached, tuple(holders))
