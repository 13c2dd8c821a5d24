"""`Tokenizer`: tokenizer.json of a Hugging Face directory, its special tokens and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from girih.checkpoint.hf_config import read_json_object, token_text
from girih.errors import CheckpointError, ConfigError, RequestError

NO_CHAT_TEMPLATE = "this model has no chat template; give one with --chat-template FILE"

_ROLES = ("bos", "eos", "unk", "pad")


class Tokenizer:
    """Text to token ids and back.

    Args:
        backend: the tokenizer itself.
        special_tokens: role -> text, e.g. {"bos": "<s>"}.
        chat_template: Jinja source, if the model has one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ):
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face directory.

        Raises:
            CheckpointError: tokenizer.json is missing or cannot be used.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{directory} has no tokenizer.json; save the tokenizer in that format first")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{path} cannot be used: {error}") from error
        # A limit stored in the file would cut prompts silently; the engine checks lengths itself.
        backend.no_truncation()
        backend.no_padding()
        config_path = directory / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.is_file() else {}
        tokens = {role: token_text(config.get(f"{role}_token")) for role in _ROLES}
        special_tokens = {role: text for role, text in tokens.items() if text is not None}
        return cls(backend, special_tokens=special_tokens, chat_template=_chat_template(directory, config))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def max_token_characters(self) -> int:
        """Return the length of the longest token, or a little more: bytes of it that are no text count each."""
        return max(map(len, self.backend.get_vocab()))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids. Other threads run meanwhile.

        Args:
            text: any text; special tokens written out in it become their ids.
            add_special_tokens: put the beginning-of-sequence token in front, for models that want it. Off for text
                from a chat template, which writes it itself.

        Raises:
            RequestError: the text holds half a surrogate pair.
        """
        try:
            # unlike `encode`, it lets go of Python's lock, for a second per million characters
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:  # the library's answer to anything that it cannot turn into UTF-8
            raise RequestError(f"text must be a string of whole Unicode characters, not {text[:40]!r}") from None
        return encoding.ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn token ids into text; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_to_text(self, token_id: int) -> str:
        """Return the text of one token by itself, special ones included."""
        return self.decode([token_id], skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        """Tell whether a token is a control token, which text for people leaves out."""
        return token_id in self._special_ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a conversation as one prompt; encode it with `add_special_tokens=False`.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            add_generation_prompt: end with the start of an assistant's turn.
            chat_template: Jinja source to use instead of the model's own.
            tools: functions that the model may call, as JSON schemas; see `uses_tools`.
            variables: what else this template knows, such as {"enable_thinking": False}.

        Raises:
            ConfigError: neither the model nor the caller has a template.
            CheckpointError: the template is not valid Jinja.
            RequestError: the template refuses these messages, or a variable is an argument here.
        """
        from girih.checkpoint.chat_template import render_chat

        template = chat_template or self.chat_template
        if template is None:
            raise ConfigError(NO_CHAT_TEMPLATE)
        own = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        if taken := own.keys() & (variables or {}).keys():
            raise RequestError(f"{min(taken)!r} is no variable of the chat template's own; it is given by itself")
        tokens = {f"{role}_token": text for role, text in self.special_tokens.items()}
        return render_chat(template, {"documents": None, **tokens, **(variables or {}), **own})

    @cached_property
    def uses_tools(self) -> bool:
        """Tell whether the model's chat template shows it tools; it would ignore them otherwise.

        Raises:
            CheckpointError: the template is not valid Jinja.
        """
        from girih.checkpoint.chat_template import variables_of

        return self.chat_template is not None and "tools" in variables_of(self.chat_template)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template: a file of its own, a string, or the one called "default" in a list."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None
