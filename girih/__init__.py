"""Girih: an LLM inference engine whose KV cache is planned by the engine core.

    from girih import LLM, SamplingParams

    with LLM("smollm2") as llm:
        print(llm.generate("The tiles of a girih", SamplingParams(max_tokens=32))[0].outputs[0].text)

Names are loaded when they are first used: `import girih` alone costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from girih.engine.async_llm import AsyncLLM
    from girih.engine.llm import LLM
    from girih.grammar import Grammar
    from girih.request import RequestOutput, SamplingParams

__all__ = ["AsyncLLM", "Grammar", "LLM", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncLLM": "girih.engine.async_llm",
    "Grammar": "girih.grammar",
    "LLM": "girih.engine.llm",
    "RequestOutput": "girih.request",
    "SamplingParams": "girih.request",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'girih' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def _version() -> str:
    """Return the installed version; a source tree that was never installed has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("girih")
    except PackageNotFoundError:
        return "0+unknown"
