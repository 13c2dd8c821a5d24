"""What a process of `girih bench startup` runs: start an engine, make one token, say how long each part took."""

from __future__ import annotations

import time

began = time.monotonic()  # of a clock that all processes of a machine share

import json  # noqa: E402
import sys  # noqa: E402

PROMPT = "Once upon a time"


def main() -> None:
    """Start the engine of the options given as JSON; print when this file began, and the phases, as JSON."""
    from girih.cli._text import one_line
    from girih.errors import GirihError

    try:
        from girih.engine.llm import LLM
        from girih.request import SamplingParams

        imported = time.monotonic()
        with LLM(**json.loads(sys.argv[1])) as llm:
            ready = time.monotonic()
            (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            ended = time.monotonic()
            phases_s = {"import": imported - began, **llm.startup_report.phases_s, "first token": ended - ready}
        if output.error is not None:
            raise GirihError(output.error)
    except GirihError as error:
        print(f"girih: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    other_s = ended - began - sum(phases_s.values())
    print(json.dumps({"began": began, "phases_s": {**phases_s, "other": other_s}}))


if __name__ == "__main__":
    main()
