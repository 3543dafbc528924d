"""Logs of the daemons: one JSON object per line, to stderr.

Keys: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, then whatever was given as ``extra=``,
then ``exception`` where there is one. What JSON does not know is written as text.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

#: Attributes that every record has: all others came by ``extra=``.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, whatever ``extra`` holds."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update(_extra(record))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        return json.dumps(fields, default=_readable, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Formats a record for people: time, level, logger, message and then ``name=value`` of each ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text; only an exception takes more lines."""
        extra = "".join(f" {name}={_readable(value)}" for name, value in _extra(record).items())
        text = f"{_time(record)} {record.levelname.lower():7} {record.name}: {record.getMessage()}{extra}"
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def configure_logging(level: str, format: str, stream: TextIO | None = None) -> None:
    """Log everything from ``level`` up to ``stream``, in the place of what was configured before.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        format: ``json`` or ``text``.
        stream: None for stderr.

    Raises:
        ValueError: the level or the format is another.

    """
    formatters: dict[str, type[logging.Formatter]] = {"json": JsonFormatter, "text": TextFormatter}
    if format not in formatters:
        raise ValueError(f"log format {format!r} is not known: use json or text")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatters[format]())
    root = logging.getLogger()
    root.setLevel(level.upper())
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.captureWarnings(capture=True)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _readable(value: object) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
