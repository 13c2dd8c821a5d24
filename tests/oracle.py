"""`Oracle`: what transformers computes for the same directory, in float32. The truth that outputs are compared with."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from girih.engine.core import EngineCore
from girih.request import RequestOutput

NEAR_TIE = 1e-3
"""Two logits closer than this may come in either order."""


class Oracle:
    """A model of transformers.

    Args:
        directory: in Hugging Face format.
    """

    def __init__(self, directory: Path):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits from which each output token was chosen, float32 [num_output_tokens, vocab_size]."""
        ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        return self.model(ids, logits_to_keep=len(output_ids), use_cache=False).logits[0].float()

    @torch.inference_mode()
    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens of transformers' own greedy decoding, which ends after an end-of-sequence token."""
        ids = torch.tensor([list(prompt_ids)])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, use_cache=True
        )
        return output[0, ids.shape[1] :].tolist()

    def check_greedy(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
        """Check that every output token is the most likely one after all before it; near ties are said, not hidden.

        Returns:
            The oracle's logits, as `logits`.
        """
        logits = self.logits(prompt_ids, output_ids)
        chosen = logits.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
        gaps = logits.max(dim=1).values - chosen
        for position in torch.nonzero(gaps).flatten().tolist():
            gap = float(gaps[position])
            assert gap < NEAR_TIE, f"output token {position} is {gap:.4g} below the most likely one"
            print(f"near tie: output token {position} of a prompt of {len(prompt_ids)} is {gap:.2g} below the best")
        return logits


@lru_cache(maxsize=2)
def oracle_of(directory: Path) -> Oracle:
    """Return a model's oracle, loaded once for all tests: the two real ones take seconds each."""
    return Oracle(directory)


def check_outputs(oracle: Oracle, outputs: Iterable[RequestOutput]) -> None:
    """Check every completion's tokens, and the log probabilities where they were asked for, against the oracle."""
    for output in outputs:
        for completion in output.outputs:
            assert completion.finish_reason in ("length", "stop")
            logits = oracle.check_greedy(output.prompt_token_ids, completion.token_ids)
            expected = torch.log_softmax(logits, dim=1)
            for position, entry in enumerate(completion.logprobs or []):
                for token_id, logprob in entry.items():
                    assert abs(logprob.logprob - float(expected[position, token_id])) < 1e-3


@contextmanager
def recorded_logits(core: EngineCore) -> Iterator[Callable[[], np.ndarray]]:
    """Record the logits of every row that samples, in order; yields a function that returns them stacked."""
    model = core.executor._worker.runner.model
    compute, seen = model.compute_logits, []

    def record(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        seen.append(logits.clone())
        return logits

    model.compute_logits = record
    try:
        yield lambda: torch.cat(seen).numpy()
    finally:
        model.compute_logits = compute
