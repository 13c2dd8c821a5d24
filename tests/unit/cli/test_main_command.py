"""The command line as a whole: help, and what a wrong one gets."""

import subprocess
import sys

import pytest


def girih(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "girih.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pln", "x"], "No such command 'pln'. Did you mean 'plan'?; see girih --help"),
        (["plan", "smollm2", "--memry", "1GiB"], "--memory"),
        (["plan", "smollm2", "--block-size", "x"], "--block-size"),
        (["bench", "throughput", "--model", "no-such-model"], "gemma3-270m, smollm2"),
        (["bench", "throughput", "--model", "smollm2", "--rounds", "0"], "--rounds"),
        (["bench", "speed"], "No such command 'speed'"),
        (["generate", "hello"], "Missing option '--model'; see girih generate --help"),
        (["plan", "no-such-model"], "gemma3-270m, smollm2"),
        (["plan", "smollm2", "--memory", "much"], "'much' is not a size; write it like 512MiB, 4GiB or 2e9"),
    ],
)
def test_a_wrong_command_line_is_one_line_on_stderr_and_exit_code_2(arguments, message) -> None:
    done = girih(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["plan"], ["generate"], ["chat"], ["pull"], ["bench"]])
def test_a_bare_command_shows_its_help_and_ends_with_exit_code_2(arguments) -> None:
    done, asked = girih(*arguments), girih(*arguments, "--help")
    assert (done.returncode, done.stdout, done.stderr) == (2, asked.stdout, "")
    assert done.stdout.count("\n") > 5


def test_help_lists_every_command_and_what_is_not_there() -> None:
    done = girih("--help")
    assert done.returncode == 0
    for word in ("bench", "chat", "generate", "plan", "pull", "CUDA", "LoRA", "KV offload", "multimodal", "embeddings"):
        assert word in done.stdout
