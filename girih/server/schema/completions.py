"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from girih.request import SamplingParams
from girih.server.config import ServerConfig
from girih.server.errors import ApiError
from girih.server.schema.common import Flag, SamplingBody, Whole, check_max_logprobs, make_params

DEFAULT_MAX_TOKENS = 16

Prompt = str | list[str] | list[int] | list[list[int]]


def _check_prompt(value: Any) -> Any:
    """Let a prompt through; by hand, as pydantic tries all alternatives on each of a million items."""
    if _is_text(value) or (type(value) is list and any(all(map(kind, value)) for kind in (_is_text, _is_id, _is_ids))):
        return value
    raise PydanticCustomError("prompt", "Input should be a text, a list of token ids, or a list of either")


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_id(value: object) -> bool:
    return type(value) is int


def _is_ids(value: object) -> bool:
    return type(value) is list and all(map(_is_id, value))


class CompletionBody(SamplingBody):
    """Complete one prompt or several."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"best_of": (1,), "suffix": ("",)}

    prompt: Annotated[Prompt, PlainValidator(_check_prompt, json_schema_input_type=Prompt)] = Field(
        description="A text, a list of token ids, or a list of either."
    )
    max_tokens: Whole = Field(DEFAULT_MAX_TOKENS, description="Of output; 0 only with echo.")
    logprobs: Whole | None = Field(None, description="Report so many most likely tokens per position.")
    echo: Flag = Field(False, description="Begin the text with the prompt.")

    def prompts(self, config: ServerConfig) -> list[str | list[int]]:
        """Return the prompts one by one.

        Raises:
            ApiError: there is none, or there are more than the server takes.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "the prompt is empty: it has no token; give at least one", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > config.max_prompts:
            raise ApiError(
                400, f"{len(self.prompt)} prompts are more than {config.max_prompts} (--max-prompts)", param="prompt"
            )
        return list(self.prompt)

    @property
    def shows_output(self) -> bool:
        """Tell whether output is wanted, and not only the prompt's log probabilities."""
        return self.max_tokens > 0

    def sampling_params(self, config: ServerConfig) -> SamplingParams:
        """Return how to sample.

        Raises:
            ApiError: a limit of the server.
            RequestError: a value out of range.
        """
        self.check_common(config)
        check_max_logprobs("logprobs", self.logprobs, config)
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens=0 is only for echo: true", param="max_tokens")
        return make_params(
            **self.common_params(),
            max_tokens=self.max_tokens or 1,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )
