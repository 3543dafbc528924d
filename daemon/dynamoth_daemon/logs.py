"""Logs of the daemons: one JSON object per line, to stderr.

Keys: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, then the fields of ``extra=``, then ``exception``
where there is one. Values that JSON does not know are written as text. Fields are flat: those of a mapping ``refused``
are called ``refused.s1``.

Agents and the balancer write through :class:`DaemonLog`, so each of their entries has the fields ``cause`` and
``plan_version``, null where there is none. Entries that are repeated are limited (:class:`LimitedHandler`): the first
of a kind is written at once, and the others are counted.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO, cast

#: Attributes that every record has: all others came by ``extra=``.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "limited"}

REPEAT_INTERVAL_S = 30.0
BURST = 3
"""This many entries of one kind are written at once; more within the interval are counted. With fewer, the log of a
connection that was lost twice would end with the wrong state."""

KINDS_MAX = 1000
"""Bound of the remembered kinds; the oldest is forgotten first."""

IDENTITY_FIELDS = ("server", "link", "channel", "subject", "kind")
"""Entries that differ in one of these are of different kinds; other fields, and numbers in the text, do not count."""

_NUMBER = re.compile(r"\d+")


class DaemonLog:
    """Writes the entries of a daemon, all in one form.

    Args:
        logger: the destination.
        plan_version: returns the version of the plan that the daemon acts on, None while it has none.
        fields: fields of every entry: the server of an agent.

    """

    def __init__(self, logger: logging.Logger, plan_version: Callable[[], int | None], **fields: Any) -> None:
        self._logger = logger
        self._plan_version = plan_version
        self._fields = fields

    def write(
        self,
        level: int,
        message: str,
        cause: str | None = None,
        /,
        *,
        limited: bool | None = None,
        exception: BaseException | None = None,
        **fields: Any,
    ) -> None:
        """Write an entry.

        Args:
            level: a level of the module ``logging``.
            message: what has happened, without figures and names: these are fields.
            cause: why.
            limited: whether it is only counted while it is repeated. None: from the level ``warning`` up.
            exception: the exception that was raised.
            fields: all else; ``plan_version`` replaces the present one.

        """
        entry: dict[str, Any] = {"cause": cause, "plan_version": self._plan_version(), **self._fields, **fields}
        reserved = {name for name in entry if name in _STANDARD}
        extra = {f"{name}_" if name in reserved else name: value for name, value in entry.items()}
        if limited is not None:
            extra["limited"] = limited
        self._logger.log(level, "%s", message, exc_info=exception, extra=extra, stacklevel=2)


@dataclass(slots=True)
class _Kind:
    """Entries of one kind."""

    began_at: float
    written: int = 1
    #: How many were not written since.
    left_out: int = 0
    latest: logging.LogRecord | None = None


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes repeated entries at intervals only; ``repeated`` says how many of the kind were left out since.

    Limited are warnings and all above, and entries of other levels that ask for it. The clock is that of the records,
    so a count that is due is written when the next entry comes, of whatever kind, or when the handler is closed.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._kinds: OrderedDict[tuple[Any, ...], _Kind] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it; write counts that are due."""
        key = _kind_of(record)
        for due in self._due(record.created):
            if due != key:
                self._summarise(due)
        if key is None:
            super().emit(record)
            return
        kind = self._kinds.get(key)
        if kind is not None and record.created - kind.began_at < REPEAT_INTERVAL_S:
            if kind.written < BURST:
                kind.written += 1
                super().emit(record)
            else:
                kind.left_out += 1
                kind.latest = record
            return
        self._kinds.pop(key, None)
        self._kinds[key] = _Kind(record.created)
        super().emit(record if kind is None else _counted(record, kind.left_out))
        if len(self._kinds) > KINDS_MAX:
            self._summarise(next(iter(self._kinds)))

    def close(self) -> None:
        """Write all counts."""
        for key in list(self._kinds):
            self._summarise(key)
        super().close()

    def _due(self, now: float) -> list[tuple[Any, ...]]:
        due: list[tuple[Any, ...]] = []
        for key, kind in self._kinds.items():  # in the order in which they began
            if now - kind.began_at < REPEAT_INTERVAL_S:
                break
            due.append(key)
        return due

    def _summarise(self, key: tuple[Any, ...]) -> None:
        """Write the latest of the entries that were left out, and forget the kind."""
        kind = self._kinds.pop(key)
        if kind.latest is not None:
            super().emit(_counted(kind.latest, kind.left_out - 1))


def _kind_of(record: logging.LogRecord) -> tuple[Any, ...] | None:
    """Return what identifies a kind of entries; None where they are not limited."""
    if not getattr(record, "limited", record.levelno >= logging.WARNING):
        return None
    fields = vars(record)
    text = _NUMBER.sub("#", record.getMessage())
    return record.name, record.levelno, text, *(str(fields.get(name)) for name in IDENTITY_FIELDS)


def _counted(record: logging.LogRecord, left_out: int) -> logging.LogRecord:
    if not left_out:
        return record
    counted = copy.copy(record)
    vars(counted)["repeated"] = left_out
    return counted


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
    """Formats a record for people: time, level, logger, message and ``name=value`` of each ``extra`` but None."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text; only an exception takes more lines."""
        extra = "".join(f" {name}={_readable(value)}" for name, value in _extra(record).items() if value is not None)
        text = f"{_time(record)} {record.levelname.lower():7} {record.name}: {record.getMessage()}{extra}"
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def configure_logging(level: str, format: str, stream: TextIO | None = None) -> None:
    """Log everything from ``level`` up to ``stream``, instead of to the streams configured before.

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
    handler = LimitedHandler(stream or sys.stderr)
    handler.setFormatter(formatters[format]())
    root = logging.getLogger()
    root.setLevel(level.upper())
    for old in root.handlers[:]:
        root.removeHandler(old)
        if isinstance(old, LimitedHandler):
            old.close()
    root.addHandler(handler)
    logging.captureWarnings(capture=True)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    given = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return dict(_flat(given, ""))


def _flat(fields: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield fields; those of a mapping get its name as prefix."""
    for name, value in fields.items():
        key = f"{prefix}{_readable(name)}"
        if isinstance(value, Mapping):
            yield from _flat(cast(Mapping[str, Any], value), f"{key}.")
        else:
            yield key, value


def _readable(value: object) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
