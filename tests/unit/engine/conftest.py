"""An engine core whose model is a config.json and whose worker is a fake one."""

import json
from types import SimpleNamespace

import pytest
from core_driver import CONFIG, FakeExecutor

from girih import plugins
from girih.config import EngineConfig
from girih.engine.core import EngineCore


@pytest.fixture
def make_core(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("girih.engine.core.resolve_model", lambda name: tmp_path)
    load = plugins.load

    def make(executor=None, *, model_config=CONFIG, **options):
        (tmp_path / "config.json").write_text(json.dumps(model_config))
        executor = executor or FakeExecutor()
        fake = SimpleNamespace(create=lambda config: executor)
        monkeypatch.setattr(
            plugins,
            "load",
            lambda package, name, *, what: fake if what == "executor" else load(package, name, what=what),
        )
        defaults = {"kv_cache_memory_bytes": 1 << 18, "max_num_seqs": 4, "block_size": 4, "check_invariants": True}
        return EngineCore(EngineConfig(model="any", **{**defaults, **options}))

    return make
