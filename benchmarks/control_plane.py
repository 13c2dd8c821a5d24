"""Time of the control plane: the cache manager and the scheduler, without any model.

    python benchmarks/control_plane.py                          this engine alone
    python benchmarks/control_plane.py --vllm-python PATH       vLLM 0.32 beside it, in the same run: ratios and marks
    python benchmarks/control_plane.py --workload W1 W3         some of W1 W2 W2L W3 W3H W4 sched sched-hybrid
    python benchmarks/control_plane.py --quick | --json

`make_adapter` runs any stream of operations (`op_streams.py`) on the real manager. docs/benchmarks.md says how time is
taken and what the marks are. The exit code is 1 if a mark is missed.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from pools import held_bytes, plan_pool

from girih.kv import KVCacheConfig, KVCacheManager, KVCacheSpec

NO_ROWS = np.zeros(0, dtype=np.int64)
NO_TOKENS = np.zeros(0, dtype=np.int32)


def make_adapter(
    specs: Mapping[str, KVCacheSpec],
    pool_bytes: int,
    *,
    max_model_len: int,
    max_num_seqs: int,
    enable_prefix_caching: bool = True,
) -> ManagerAdapter:
    """Plan a pool for these layers and put the real manager behind the operations of `op_streams.py`.

    Args:
        specs: layer name -> spec, in model order.
        pool_bytes: bytes of the pool; the null page comes on top.
        max_model_len: longest sequence in tokens.
        max_num_seqs: requests that are held at once.
        enable_prefix_caching: reuse the cache of equal prefixes.
    """
    return ManagerAdapter(
        plan_pool(specs, pool_bytes, max_model_len=max_model_len, max_num_seqs=max_num_seqs),
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
    )


class ManagerAdapter:
    """The real manager behind one operation per method, called in the order of the engine core.

        admit       `admit`
        prefill     `reserve` and `publish` a chunk
        step_batch  take in the last step's samples (`update`), then `reserve` one token per row
        tick        hand the step out (`take_cache_update`); tokens of unfinished prompts then count as computed

    Args:
        config: the plan.
        max_num_seqs: rows.
        enable_prefix_caching: reuse the cache of equal prefixes.
    """

    def __init__(self, config: KVCacheConfig, *, max_num_seqs: int, enable_prefix_caching: bool = True):
        self.config = config
        self.manager = KVCacheManager(config, max_num_seqs=max_num_seqs, enable_prefix_caching=enable_prefix_caching)
        self._row_of = np.full(1024, -1, dtype=np.int64)  # by request id; -1: holds no row
        self._waiting: dict[int, np.ndarray] = {}  # prompts for which there was no room yet
        self._num_prompt = [0] * max_num_seqs
        self._scheduled = np.zeros(max_num_seqs, dtype=np.int32)  # reserved tokens that no update has taken in
        self._in_step: list[np.ndarray] = []  # rows reserved since the last step was handed out
        self._refused: set[int] = set()  # rows whose sampled token was taken in, but has no room yet
        self._partial: list[int] = []  # rows of the last step that compute a part of their prompt, not its end
        self._ones = np.ones(max_num_seqs, dtype=np.int32)
        self._all_done = np.ones(max_num_seqs, dtype=bool)
        self._all_done.flags.writeable = False

    def tick(self) -> None:
        """Begin a step."""
        self._hand_out()
        if self._partial:
            rows, self._partial = np.array(self._partial), []
            self._take_in(rows, NO_ROWS, NO_TOKENS)
            self._scheduled[rows] = 0

    def admit(self, rid: int, tokens: Sequence[int] | np.ndarray) -> int:
        """Take a request in; without room it waits for `prefill` to try again.

        Args:
            rid: its id, a small non-negative number.
            tokens: token ids of the prompt.

        Returns:
            Tokens of the longest cached prefix.
        """
        token_ids = tokens.astype(np.int32) if isinstance(tokens, np.ndarray) else _int32(tokens)
        if rid >= len(self._row_of):
            self._row_of = np.concatenate([self._row_of, np.full(max(rid, len(self._row_of)), -1)])
        hit = self._enter(rid, token_ids)
        if hit is None:
            self._waiting[rid] = token_ids
            return self.manager.lookup(token_ids)
        return hit

    def prefill(self, rid: int, n_max: int) -> bool:
        """Compute up to `n_max` more tokens of the prompt; False, with nothing scheduled, if there is no room."""
        if rid in self._waiting:
            if self._enter(rid, self._waiting[rid]) is None:
                return False
            del self._waiting[rid]
        row = self._row_of.item(rid)
        if row in self._partial:  # several chunks in one tick
            self.tick()
        computed = self.manager.num_computed_tokens.item(row) + self._scheduled.item(row)
        end = min(computed + n_max, self._num_prompt[row])
        if end <= computed:
            return True
        rows = np.array([row])
        if self.manager.reserve(rows, _int32([end - computed])) == 0:
            return False
        self.manager.publish(rows, _int32([end]))
        self._scheduled[row] = end - computed
        self._in_step.append(rows)
        if end < self._num_prompt[row]:
            self._partial.append(row)
        return True

    def step(self, rid: int, tok: int) -> bool:
        """Append a sampled token to a request and make room for one more; see `step_batch`."""
        return bool(self.step_batch(np.array([rid]), _int32([tok]))[0])

    def step_batch(self, rids: Sequence[int] | np.ndarray, toks: Sequence[int] | np.ndarray) -> np.ndarray:
        """Append a sampled token to each request and make room for one more.

        Args:
            rids: int [n], distinct; requests whose prompt is computed.
            toks: int [n]; ignored for a request that was refused last time, for it has its token.

        Returns:
            bool [n]; whether there was room.
        """
        rows, token_ids = self._row_of[rids], np.asarray(toks, dtype=np.int32)
        if self._refused:
            new = np.array([row not in self._refused for row in rows.tolist()], dtype=bool)
            self._take_in(rows[new], rows[new], token_ids[new])
        else:
            self._take_in(rows, rows, token_ids)
        ones, done = self._ones[: len(rows)], self._all_done[: len(rows)]
        served = self.manager.reserve(rows, ones)
        if self._refused or served < len(rows):
            done = done.copy()
            while served < len(rows):  # whoever is refused does not stop those behind
                done[served] = False
                served += 1
                served += self.manager.reserve(rows[served:], ones[served:])
            self._refused = (self._refused - {*rows.tolist()}) | {*rows[~done].tolist()}
            self._scheduled[rows[~done]] = 0
            rows = rows[done]
        self._scheduled[rows] = 1
        self._in_step.append(rows)
        return done

    def free(self, rid: int) -> None:
        """Finish a request; whatever it has room for counts as computed."""
        if self._waiting.pop(rid, None) is not None:
            return
        row = self._row_of.item(rid)
        self._hand_out()
        if row in self._partial:
            self._partial.remove(row)
        if self._scheduled.item(row):
            self._take_in(np.array([row]), NO_ROWS, NO_TOKENS)
        self.manager.free(row)
        self._row_of[rid] = -1
        self._refused.discard(row)

    def pages_held(self) -> dict[int, int]:
        """Return group -> pages that requests reference."""
        return dict(enumerate(self.manager.stats().referenced_pages))

    def bytes_held(self) -> int:
        """Return the bytes of these pages and of the unused part of borrowed slabs."""
        return held_bytes(self.manager)

    def capacity_bytes(self) -> int:
        """Return the bytes of the pool."""
        return self.config.pool_bytes

    def check(self) -> None:
        """Raise AssertionError if the manager breaks one of its invariants."""
        self.manager.check()

    def _enter(self, rid: int, token_ids: np.ndarray) -> int | None:
        admitted = self.manager.admit(token_ids, num_prompt_tokens=len(token_ids))
        if admitted is None:
            return None
        row, hit = admitted
        self._row_of[rid] = row
        self._num_prompt[row] = len(token_ids)
        self._scheduled[row] = 0
        return hit

    def _hand_out(self) -> None:
        if self._in_step:
            self.manager.take_cache_update(
                self._in_step[0] if len(self._in_step) == 1 else np.concatenate(self._in_step)
            )
            self._in_step = []

    def _take_in(self, rows: np.ndarray, sampled_rows: np.ndarray, token_ids: np.ndarray) -> None:
        # whoever is scheduled anew, or not, says so afterwards
        self.manager.update(rows, self._scheduled[rows], sampled_rows, token_ids)


def _int32(tokens: Sequence[int]) -> np.ndarray:
    # several times faster than numpy, which looks at every element's type
    token_ids = np.empty(len(tokens), dtype=np.int32)
    struct.pack_into(f"={len(tokens)}i", token_ids, 0, *tokens)
    return token_ids


def main() -> int:
    """Run what the command line asks for; return 1 if a mark is missed."""
    from control_runs import run_all

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="a Python that can import vllm 0.32")
    parser.add_argument("--workload", nargs="+", default=[], help="some of W1 W2 W2L W3 W3H W4 sched sched-hybrid")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: where others use the machine too"
    )
    parser.add_argument("--quick", action="store_true", help="small workloads, no marks")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = run_all(
        args.workload,
        reps=args.reps,
        quick=args.quick,
        clock=args.clock,
        vllm_python=args.vllm_python,
        as_text=not args.json,
    )
    if args.json:
        print(json.dumps(report))
    return 1 if any(mark["missed"] for mark in report["marks"]) else 0


if __name__ == "__main__":
    sys.exit(main())
