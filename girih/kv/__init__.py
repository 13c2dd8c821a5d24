"""The KV cache: what layers ask for, the plan of the pool, and its manager. Without torch.

Names are imported when they are first used, so that planning starts without numpy and numba:
`from girih.kv import FullAttentionSpec, get_kv_cache_configs, KVCacheManager`.
"""

import importlib
from typing import Any

from girih import plugins

# public name -> module; the specs are found in `kv/specs`, where a new file is a new name
_MODULES = {
    "KVCacheConfig": "girih.kv.config",
    "KVCacheGroupSpec": "girih.kv.config",
    "KVCacheLayer": "girih.kv.config",
    "KVCacheManager": "girih.kv.manager",
    "KVCacheSpec": "girih.kv.spec",
    "Retention": "girih.kv.retention",
    "TensorView": "girih.kv.spec",
    "get_kv_cache_configs": "girih.kv.plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562)."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name.endswith("Spec"):
        for kind in plugins.available("girih.kv.specs"):
            spec = plugins.load("girih.kv.specs", kind, what="cache spec").SPEC
            if spec.__name__ == name:
                return spec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
