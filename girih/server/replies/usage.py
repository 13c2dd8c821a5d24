"""The numbers of tokens of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from girih.request import RequestOutput


def usage(outputs: Sequence[RequestOutput], *, shows_output: bool = True) -> dict[str, Any]:
    """Return the `usage` of an answer.

    Args:
        outputs: of its prompts.
        shows_output: False when the output was thrown away.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs) if shows_output else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
