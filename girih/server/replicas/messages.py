"""What goes from the ingress to a replica: an HTTP request, and what the router needs to know of it."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

AsgiMessage = MutableMapping[str, Any]


@dataclass(frozen=True)
class Hint:
    """What decides where a request goes.

    Args:
        token_ids: int32 [n]; of its prompt, of the first if it has several.
        salt: of its prefixes, as `salt_of` returns it.
        num_sequences: that it asks for.
    """

    token_ids: np.ndarray
    salt: str
    num_sequences: int


@dataclass(frozen=True)
class Forwarded:
    """One HTTP request.

    Args:
        scope: of ASGI, as far as it is plain data.
        body: whole.
        hint: None for a request without a prompt, or with one that no server would take.
    """

    scope: dict[str, Any]
    body: bytes
    hint: Hint | None
