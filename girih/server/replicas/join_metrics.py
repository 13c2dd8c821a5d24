"""The metrics of several replicas as one text."""

from __future__ import annotations

from collections.abc import Iterable


def join_metrics(texts: Iterable[str]) -> str:
    """Return the samples of all texts, those of a metric together, as Prometheus wants them.

    Args:
        texts: in Prometheus' text format; samples differ in a label.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                heads.setdefault(name, [])
                samples.setdefault(name, [])
            if not line.startswith("#"):
                samples[name].append(line)
            elif line not in heads[name]:
                heads[name].append(line)
    return "".join(f"{line}\n" for name in heads for line in (*heads[name], *samples[name]))
