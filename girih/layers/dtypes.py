"""Names of dtypes, as config.json and our specs have them, to torch's and back."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name such as "bfloat16"."""
    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")
