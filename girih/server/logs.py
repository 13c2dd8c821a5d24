"""The server's log lines: text for people, or a JSON object each for programs."""

from __future__ import annotations

import json
import logging
import sys
import time

FIELDS = ("request_id", "status", "seconds", "user")
"""What a record may carry beside its message."""


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """One line per record, with what it carries at the end."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = [f"{name}={_short(getattr(record, name))}" for name in FIELDS if hasattr(record, name)]
        return " ".join([super().format(record), *fields])


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def set_up_logs(log_format: str) -> None:
    """Write log lines to standard error.

    Args:
        log_format: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    text = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
