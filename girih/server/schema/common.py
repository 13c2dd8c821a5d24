"""What completions and chats have in common: the fields of sampling, and how they become `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from girih.grammar import Grammar
from girih.request import SamplingParams
from girih.server.config import ServerConfig
from girih.server.errors import ApiError
from girih.server.replies.usage import UsageChunks

Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]

MAX_STOPS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024


class First(FailFast):
    """Of a list: look no further than the first item that is wrong."""

    __hash__ = object.__hash__  # parts of a union need one


class Body(BaseModel):
    """A JSON object without unknown fields; null is as good as left out.

    Of many things that are wrong only the first is looked for, also in lists (`First`): to describe them all takes
    a thousand times the memory of the body.
    """

    model_config = ConfigDict(extra="forbid")

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are not supported -> values that ask for nothing, which are let pass."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {
            name: value
            for name, value in data.items()
            if value is not None and not any(value is v or value == v for v in cls.NEUTRAL.get(name, ()))
        }
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in given if name not in known), None)
        return given if unknown is None else {unknown: given[unknown]}


class StreamOptions(Body):
    """Of a streamed answer."""

    include_usage: Flag = Field(False, description="Send the numbers of tokens in a last chunk.")
    continuous_usage_stats: Flag = Field(
        False, description="Beyond OpenAI's: send them with every chunk too, as of then; with include_usage."
    )


class JsonSchema(Body):
    """A schema that the output follows."""

    name: Text = ""
    description: Text = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Flag = True


class ResponseFormat(Body):
    """What form the output has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """Return what the output must look like; None for any text.

        Raises:
            ApiError: there is no schema where there should be one.
            RequestError: it is too long, or no schema at all.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar.json_object()
        if self.json_schema is None:
            raise ApiError(400, "response_format of type json_schema needs json_schema", param="response_format")
        return Grammar.json_schema(self.json_schema.schema_)


class SamplingBody(Body):
    """The fields of sampling that every request has."""

    model: Text | None = Field(None, description="A name of /v1/models; left out, the model that is served.")
    n: Whole | None = Field(None, description="Completions of each prompt.")
    temperature: Number | None = Field(None, description="0 is greedy; left out, 1.")
    top_p: Number | None = None
    stop: Text | Annotated[list[Text], First(), MaxLen(MAX_STOPS)] | None = Field(
        None, description="Strings that end the output; not part of it."
    )
    stream: Flag = False
    stream_options: StreamOptions | None = None
    seed: Whole | None = Field(None, description="Same seed, same tokens.")
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = Field(
        None, max_length=MAX_BIASES, description="Token id -> what is added to its logit."
    )
    response_format: ResponseFormat | None = None
    user: Text | None = Field(None, description="Written to the log, nothing else.")

    top_k: Whole | None = Field(None, description="Beyond OpenAI's: keep the k most likely tokens.")
    min_p: Number | None = Field(None, description="Beyond OpenAI's: drop tokens below this share of the likeliest.")
    repetition_penalty: Number | None = Field(None, description="Beyond OpenAI's.")
    min_tokens: Whole | None = Field(None, description="Beyond OpenAI's: no end before so many tokens.")
    stop_token_ids: Annotated[list[Whole], First()] | None = Field(
        None, max_length=MAX_STOP_TOKEN_IDS, description="Beyond OpenAI's."
    )
    ignore_eos: Flag = Field(False, description="Beyond OpenAI's: go on after the end-of-sequence token.")
    cache_salt: Text = Field("", description="Beyond OpenAI's: share cached prefixes only with this salt.")
    priority: Whole = Field(0, description="Beyond OpenAI's: smaller is more important (--scheduling-policy priority).")

    @property
    def num_completions(self) -> int:
        """Return how many completions of each prompt are asked for."""
        return 1 if self.n is None else self.n

    @property
    def usage_chunks(self) -> UsageChunks:
        """Return which chunks of a streamed answer have the numbers of tokens."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return UsageChunks.NONE
        return UsageChunks.ALL if options.continuous_usage_stats else UsageChunks.LAST

    def check_common(self, config: ServerConfig) -> None:
        """Refuse what exceeds the server's limits.

        Raises:
            ApiError: names field and limit.
        """
        if not 1 <= self.num_completions <= config.max_n:
            raise ApiError(400, f"n={self.num_completions} must be from 1 to {config.max_n} (--max-n)", param="n")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for stream: true", param="stream_options")

    def common_params(self) -> dict[str, Any]:
        """Return the keywords of `SamplingParams` that were given."""
        names = (
            "temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p",
            "repetition_penalty", "min_tokens", "stop_token_ids",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {
            **given,
            "n": self.num_completions,
            "ignore_eos": self.ignore_eos,
            "logit_bias": _by_token_id(self.logit_bias or {}),
            "grammar": None if self.response_format is None else self.response_format.grammar(),
        }


def _by_token_id(bias: Mapping[str, float]) -> dict[int, float]:
    """Return biases by number: JSON has only text for names."""
    for name in bias:
        if not (name.isascii() and name.isdecimal()):
            raise ApiError(400, f"logit_bias: {name!r} is no token id", param="logit_bias")
    return {int(name): value for name, value in bias.items()}


def check_max_logprobs(name: str, value: int | None, config: ServerConfig) -> None:
    """Refuse more log probabilities than the server gives.

    Raises:
        ApiError: names field and limit.
    """
    if value is not None and not 0 <= value <= config.max_logprobs:
        raise ApiError(400, f"{name}={value} must be from 0 to {config.max_logprobs} (--max-logprobs)", param=name)


def make_params(**keywords: Any) -> SamplingParams:
    """Make sampling parameters; they refuse what is out of range themselves."""
    return SamplingParams(**keywords)
