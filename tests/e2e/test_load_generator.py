"""A load generator that people use, guidellm from PyPI in an environment of its own, against a real server."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

from girih.checkpoint.resolve import resolve_model

GUIDELLM = "guidellm==0.8.1"
NUM_REQUESTS, NUM_OUTPUT_TOKENS = 24, 16

pytestmark = [pytest.mark.soak, pytest.mark.real_weights, pytest.mark.xdist_group("smollm2")]


@pytest.fixture(scope="module")
def guidellm(tmp_path_factory):
    """Install it; with torch on the same line, as an open range takes gigabytes of CUDA."""
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    torch = re.search(r"^torch==\S+$", constraints, re.MULTILINE)[0]
    folder = tmp_path_factory.mktemp("guidellm")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", torch, GUIDELLM], check=True)
    return folder / "bin" / "guidellm"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_request_of_guidellm_is_answered_in_full(guidellm, path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, report = resolve_model("smollm2"), tmp_path / "report.json"
    with ServerProcess(model, "--kv-cache-memory", "256MiB", folder=tmp_path) as server:
        command = [
            guidellm, "run",
            "--backend", f"kind=openai_http,target={server.url},request_format={path}",
            "--profile", "kind=concurrent,streams=6",
            "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--data", f"kind=synthetic_text,prompt_tokens=48,output_tokens={NUM_OUTPUT_TOKENS}",
            "--tokenizer", f"kind=huggingface_auto,model={model}",
            "--output", f"kind=json,path={report}",
            "--disable-progress",
        ]  # fmt: skip
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
        server.wait_until_idle()
        assert not re.search(r"POST /v1/.* status=[45]\d\d", server.log)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [len(requests[kind]) for kind in ("successful", "errored", "incomplete")] == [NUM_REQUESTS, 0, 0]
    assert all(request["output_tokens"] == NUM_OUTPUT_TOKENS for request in requests["successful"])
