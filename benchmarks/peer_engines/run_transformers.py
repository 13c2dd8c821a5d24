"""transformers, as a process that `peers.py` times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peer_loop import Generate, serve


def make(work: dict[str, Any]) -> Generate:
    """Load the model in the dtype of the options."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, work["options"]["dtype"])
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_output_tokens: int) -> Sequence[int]:
        ids = torch.tensor(prompts)
        length = {"max_new_tokens": num_output_tokens, "min_new_tokens": num_output_tokens}
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        return [answer.shape[1] - ids.shape[1]] * len(prompts)

    return generate


if __name__ == "__main__":
    serve(make)
