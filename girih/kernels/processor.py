"""What the processor that kernels are compiled for can do, beyond what LLVM finds by itself."""

from __future__ import annotations

from functools import cache

import torch
from numba.core.registry import cpu_target


@cache
def multiplies_int8() -> bool:
    """Tell whether it multiplies int8 matrices itself (AMX), and the system lets this process do so."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+amx-int8" in features.split(",") and torch.cpu._init_amx()
