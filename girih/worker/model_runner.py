"""`ModelRunner`: runs steps of one model on one device; the same for every device.

pages moved and copied -> rows and block tables -> flat tokens and group metadata -> model
    -> logits of the rows that sample -> sampler

Of several workers, each computes every step; a later pipeline stage goes on with the hidden states of the one before,
and one worker samples for all.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from girih.attention import GroupMetadata, KVCacheView
from girih.kv.config import KVCacheConfig
from girih.layers.dtypes import torch_dtype
from girih.layers.forward_context import ForwardContext, StateMetadata, bind_kv_cache
from girih.layers.parallel import Ranks
from girih.messages import StepInput, StepOutput, TokenLogprobs
from girih.models import CausalLM
from girih.request import SamplingParams
from girih.units import cdiv
from girih.worker.grammar import GrammarRows
from girih.worker.input_batch import FlatBatch, InputBatch
from girih.worker.kv_cache import PagePool
from girih.worker.sampler import SampleInput, SamplingRows, sample, token_logprobs
from girih.worker.token_exchange import TokenExchange

NO_ROWS = np.zeros(0, np.int32)

# logits are made for this many elements at a time (rows x vocabulary), and tokens sampled from fewer, as that needs
# several copies: so a large vocabulary with many rows needs no more memory than a few rows
LOGITS_ELEMENTS = 1 << 24
SAMPLER_ELEMENTS = 1 << 20

NOT_A_NUMBER = (
    "no token can be chosen for this request: min_tokens with stop_token_ids holds all of them back, the tokenizer has "
    "none that its grammar allows, or the model computed no finite numbers (damaged weights, or too large for the "
    "dtype: try --dtype float32)"
)

# of the warm-up's prompt: more than the few that some kernels treat in another way
WARM_UP_TOKENS = 33

# context of the profile step's decode rows, all together: enough to fill a backend's buffers
PROFILE_DECODE_TOKENS = 1 << 17

# tokens of the profile step at the end of the longest context: enough for a backend's tile of queries
PROFILE_DEEP_TOKENS = 64


class ModelRunner:
    """Runs the steps of one model.

    Args:
        model: with weights.
        context: knows the model's layers.
        vocab_size: of the logits.
        max_num_seqs: rows of a batch.
        eos_token_ids: the model's end-of-sequence ids.
        grammars: of outputs that have one.
        ranks: this worker among others.
    """

    def __init__(
        self,
        model: CausalLM,
        context: ForwardContext,
        *,
        vocab_size: int,
        max_num_seqs: int,
        eos_token_ids: Sequence[int],
        grammars: GrammarRows,
        ranks: Ranks,
    ):
        self.model = model
        self.ranks = ranks
        self.place = ranks.place
        self.context = context
        self.max_num_seqs = max_num_seqs
        self.eos_token_ids = tuple(eos_token_ids)
        self.grammars = grammars
        self.is_warm = False
        self.logits_rows = max(1, LOGITS_ELEMENTS // vocab_size)
        self.sampler_rows = max(1, SAMPLER_ELEMENTS // vocab_size)

    def bind(self, kv_caches: Mapping[str, KVCacheView], pages: PagePool, config: KVCacheConfig) -> None:
        """Take the layers' caches and make the batch of the plan's size.

        Args:
            kv_caches: by layer name.
            pages: the pool that they are views of.
            config: the plan.
        """
        self.context = bind_kv_cache(kv_caches, self.context)
        self.pages = pages
        self.batch = InputBatch(config, self.max_num_seqs, self.eos_token_ids)
        self.tokens = TokenExchange(self.ranks, self.batch)

    @torch.inference_mode()
    def execute_model(self, step: StepInput) -> StepOutput:
        """Compute a step, which may be one that only changes the cache; caches and batch must be bound.

        Only the output of the worker that samples has tokens and log probabilities.
        """
        self.pages.copy(step.cache.moves)
        self.pages.copy(step.cache.copies)
        self.tokens.await_for(step)
        self.batch.apply(step.new_rows, step.cache.tables)
        if self.place.samples:
            self.grammars.apply(step.new_rows)
        if not step.rows.size:
            return StepOutput(step.step_id, NO_ROWS, NO_ROWS)
        flat = self.batch.flatten(step)
        hidden = self._forward(flat)
        rows = step.rows[step.samples]
        if not self.place.is_last:
            self.tokens.receive(rows)
            return StepOutput(step.step_id, NO_ROWS, NO_ROWS)
        prompt_logprobs = self._prompt_logprobs(hidden, step, flat.query_starts)
        last_tokens = flat.query_starts[1:][step.samples] - 1
        token_ids, logprobs = self._sample(hidden[torch.from_numpy(last_tokens)], rows)
        if not self.place.samples:
            self.tokens.receive(rows)
            return StepOutput(step.step_id, NO_ROWS, NO_ROWS)
        failed = {row: self.grammars.failure(row) or NOT_A_NUMBER for row in rows[token_ids < 0].tolist()}
        self.tokens.send(rows, token_ids)
        rows, token_ids = rows[token_ids >= 0], token_ids[token_ids >= 0]
        self.grammars.consume(rows, token_ids)
        return StepOutput(step.step_id, rows, token_ids, logprobs, prompt_logprobs, failed)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Once, touch the weights and compute a small step without a cache: a prompt, and one that goes on.

        Weights mapped from a file are in memory then, and what is compiled when it is first used is compiled. The ranks
        of a pipeline stage must do it together.
        """
        if self.is_warm:
            return
        for parameter in self.model.parameters():
            elements = parameter.flatten()
            elements[:: mmap.PAGESIZE // elements.itemsize].sum()  # something of each page
            elements[-1:].sum()  # a mapped tensor need not begin with a page
        self._made_up_step([0, 1], [WARM_UP_TOKENS, 1], layers=self.model.distinct_layers())
        if self.model.replayed is not None:
            self.model.replayed.get_ready()
        self.is_warm = True

    @torch.inference_mode()
    def profile(self, max_num_batched_tokens: int, max_model_len: int) -> None:
        """Compute what needs the most memory in the largest step, without a cache.

        A few tokens at the end of the longest context, decode rows, and prompts that fill the step; through one
        layer of each kind, as the others need the same memory after it was given back; then one slice of logits
        and sampling. Queries are attended from in tiles of fixed size, so the few stand for many. The ranks of a
        pipeline stage must do it together; stages do not wait for each other.

        Args:
            max_num_batched_tokens: tokens of a step.
            max_model_len: of the longest request, in tokens.
        """
        num_decodes = max(0, min(self.max_num_seqs, max_num_batched_tokens // 2) - 2)
        deep = min(PROFILE_DEEP_TOKENS, max_model_len, max_num_batched_tokens - num_decodes)
        rest = max_num_batched_tokens - num_decodes - deep
        prompts = [max_model_len] * (rest // max_model_len) + [rest % max_model_len] * (rest % max_model_len > 0)
        decode_context = min(max_model_len, max(1, PROFILE_DECODE_TOKENS // max(1, num_decodes))) - 1
        self._made_up_step(
            [max_model_len - deep] + [decode_context] * num_decodes + [0] * len(prompts),
            [deep] + [1] * num_decodes + prompts,
            layers=self.model.distinct_layers(),
        )

    def _forward(self, flat: FlatBatch) -> torch.Tensor:
        received, shape = None, (flat.positions.numel(), self.model.hidden_size)
        if not self.place.is_first:
            received = self.ranks.receive(shape, self.model.dtype)
        context = self.context.for_step(flat.attention, flat.states)
        hidden = self.model(flat.input_ids, flat.positions, context, hidden=received)
        if not self.place.is_last:
            self.ranks.send(hidden)
        return hidden

    def _sample(self, hidden: torch.Tensor, rows: np.ndarray) -> tuple[np.ndarray, dict[int, TokenLogprobs]]:
        """Sample for rows int32 [m] from hidden states [m, hidden_size]: token ids int32 [m], log probabilities.

        A row whose logits are not numbers gets -1 and no log probabilities; a rank that has no logits, -1 everywhere.
        """
        token_ids = np.full(rows.size, -1, np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        for part in slices(rows.size, self.logits_rows):
            logits = self.model.compute_logits(hidden[part])
            if logits is None:
                continue
            for few in slices(len(logits), self.sampler_rows):
                token_ids[part][few] = self._sample_few(logits[few], rows[part][few], logprobs)
        return token_ids, logprobs

    def _sample_few(self, logits: torch.Tensor, rows: np.ndarray, logprobs: dict[int, TokenLogprobs]) -> np.ndarray:
        """Sample from logits [k, vocab_size] of rows int32 [k]; add the log probabilities of those that asked."""
        batch = self.batch
        few = SampleInput(
            params=batch.sampling.params[rows],
            num_tokens=batch.num_tokens[rows],
            num_prompt_tokens=batch.num_prompt_tokens[rows],
            token_ids_of=lambda i: batch.token_ids[rows[i], : batch.num_tokens[rows[i]]],
            end_token_ids_of=lambda i: batch.sampling.end_token_ids[rows[i]],
            logit_bias_of=lambda i: batch.sampling.logit_bias[rows[i]],
            forbid=lambda logits: self.grammars.forbid(logits, rows),
        )
        num_top = few.params["logprobs"]
        asked = np.flatnonzero(num_top >= 0)
        if not asked.size:
            return sample(logits, few)
        own_logits = logits[torch.from_numpy(asked)]  # a copy, as sampling changes the logits
        token_ids = sample(logits, few)
        for i, k in enumerate(asked):
            if token_ids[k] < 0:
                continue
            logprobs[int(rows[k])] = token_logprobs(own_logits[i : i + 1], token_ids[k : k + 1], int(num_top[k]))
        return token_ids

    def _prompt_logprobs(
        self, hidden: torch.Tensor, step: StepInput, query_starts: np.ndarray
    ) -> dict[int, TokenLogprobs]:
        """Report, for rows that asked, the prompt tokens that follow the positions computed in this step."""
        result = {}
        for i in np.flatnonzero(self.batch.sampling.params["prompt_logprobs"][step.rows] >= 0):
            row, first = int(step.rows[i]), int(step.num_computed_tokens[i])
            stop = min(first + int(step.num_scheduled_tokens[i]), int(self.batch.num_prompt_tokens[row]) - 1)
            if stop <= first:
                continue
            targets = self.batch.token_ids[row, first + 1 : stop + 1]
            num_top = int(self.batch.sampling.params["prompt_logprobs"][row])
            row_hidden = hidden[query_starts[i] : query_starts[i] + stop - first]
            parts = []
            for part in slices(stop - first, self.sampler_rows):
                logits = self.model.compute_logits(row_hidden[part])
                if logits is not None:
                    parts.append(token_logprobs(logits, targets[part], num_top))
            if not parts:
                continue
            result[row] = TokenLogprobs(
                *(
                    np.concatenate([getattr(part, name) for part in parts])
                    for name in ("token_ids", "logprobs", "ranks")
                )
            )
        return result

    def _made_up_step(self, num_computed: list[int], num_new: list[int], layers: Sequence[int]) -> None:
        """Run a made-up step over caches of a single page, which every block of every row points to, then sample."""
        query_starts = np.concatenate(([0], np.cumsum(num_new)))
        positions = np.concatenate(
            [np.arange(start, start + new) for start, new in zip(num_computed, num_new, strict=True)]
        )
        kv_caches = self._caches_of_one_page()
        nothing, page_0 = np.zeros(0, np.int64), np.zeros(len(num_new), np.int64)
        attention = {
            cache.group: GroupMetadata(
                query_starts=query_starts,
                num_computed_tokens=np.array(num_computed),
                block_table=np.zeros((len(num_new), cdiv(int(positions.max()) + 1, cache.block_size)), np.int32),
                slot_mapping=torch.from_numpy(positions % cache.block_size),
            )
            for cache in kv_caches.values()
        }
        states = {group: StateMetadata(query_starts, page_0, page_0, nothing, nothing, nothing) for group in attention}
        context = replace(self.context, kv_caches=kv_caches).for_step(attention, states)
        input_ids = torch.zeros(positions.size, dtype=torch.int64)
        received = None
        if not self.place.is_first:
            received = torch.zeros(positions.size, self.model.hidden_size, dtype=self.model.dtype)
        hidden = self.model(input_ids, torch.from_numpy(positions), context, layers, received)
        if self.place.is_last:
            self._sample_everything(hidden[: min(len(num_new), self.logits_rows)])

    def _caches_of_one_page(self) -> dict[str, KVCacheView]:
        """Return a cache of one page for each layer, each in a group of its own."""
        caches = {}
        for group, (name, layer) in enumerate(self.context.layers.items()):
            spec = layer.get_kv_cache_spec()
            block_size = spec.block_size_multiple * cdiv(16, spec.block_size_multiple)
            tensors = {
                view.name: torch.zeros((1, *view.shape), dtype=torch_dtype(view.dtype))
                for view in spec.view(block_size)
            }
            caches[name] = KVCacheView(tensors, group, block_size)
        return caches

    def _sample_everything(self, hidden: torch.Tensor) -> None:
        """Make one slice of logits, and sample from a part of it with every option that needs memory."""
        logits = self.model.compute_logits(hidden)
        if logits is None:
            return
        logits = logits[: self.sampler_rows]
        rows = SamplingRows(1, self.eos_token_ids)
        almost_all = logits.shape[1] - 1
        rows.set(0, SamplingParams(top_k=almost_all, top_p=0.99, min_p=0.01, repetition_penalty=1.1, seed=0))
        own_logits = logits.clone()
        one = np.ones(len(logits), np.int64)
        few = SampleInput(
            params=np.repeat(rows.params, len(logits)),
            num_tokens=one,
            num_prompt_tokens=one,
            token_ids_of=lambda _: np.zeros(1, np.int32),
            end_token_ids_of=lambda _: rows.end_token_ids[0],
            logit_bias_of=lambda _: (),
            forbid=lambda _: None,
        )
        token_logprobs(own_logits, sample(logits, few).clip(min=0), num_top=1)


def slices(total: int, size: int) -> Iterator[slice]:
    """Cut 0 .. total into slices of at most `size`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
