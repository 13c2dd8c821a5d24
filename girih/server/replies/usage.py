"""The numbers of tokens of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from girih.request import RequestOutput


class UsageChunks(Enum):
    """Which chunks of a streamed answer have the numbers of tokens."""

    NONE = 0
    LAST = 1
    ALL = 2

    def of_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return what a chunk before the last one says of them."""
        if self is UsageChunks.NONE:
            return {}
        return {"usage": usage(outputs) if self is UsageChunks.ALL else None}


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
