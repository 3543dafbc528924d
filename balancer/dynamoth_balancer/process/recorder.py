"""Records the reports of agents, one JSON object per line, for the analytics jobs.

The balancer works whatever happens to the file: a row that cannot be written is counted, and the log says when that
begins and ends. Rows are only ever appended, so that ``logrotate`` can copy and truncate the file; nothing here bounds
its size.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from dynamoth.errors import ConfigError
from dynamoth.protocol.reports import Report
from dynamoth_daemon.logs import DaemonLog

CANNOT = "metrics cannot be recorded: make room, or choose another file; all else goes on"


def report_row(report: Report, time_s: float, load_ratio_averaged: float | None) -> dict[str, Any]:
    """Return a report, its channels added up, as one flat row. ``time_s`` is in seconds since 1970."""
    columns, rest = report.columns, report.rest
    return {
        "time_s": round(time_s, 3),
        "server": report.server,
        "incarnation": report.incarnation,
        "sequence": report.sequence,
        "interval_s": report.interval_s,
        "plan_version": report.plan_version,
        "load_ratio": report.load_ratio,
        "load_ratio_averaged": load_ratio_averaged,
        "tightest_ratio": report.tightest_ratio,
        "outgoing_bytes_per_s": report.outgoing_bytes_per_s,
        "outgoing_bytes_per_s_max": report.outgoing_bytes_per_s_max,
        "outgoing_is_estimate": report.outgoing_is_estimate,
        "incoming_bytes_per_s": report.incoming_bytes_per_s,
        "cpu_ratio": report.cpu_ratio,
        "memory_bytes": report.memory_bytes,
        "memory_bytes_max": report.memory_bytes_max,
        "connections": report.connections,
        "connections_max": report.connections_max,
        "output_buffer_bytes_max": report.output_buffer_bytes_max,
        "observation_lag_s": report.observation_lag_s,
        "blind_s": report.blind_s,
        "channels": len(columns) + rest.channels,
        "publications": sum(columns.publications) + rest.publications,
        "subscribers": sum(columns.subscribers) + rest.subscribers,
        "messages_sent": sum(columns.messages_sent) + rest.messages_sent,
        "bytes_in": sum(columns.bytes_in) + rest.bytes_in,
        "bytes_out": sum(columns.bytes_out) + rest.bytes_out,
    }


class Recorder:
    """Appends rows to a file."""

    def __init__(self, path: Path, log: DaemonLog | None = None) -> None:
        """Open the file, and make it if it is not there. ``log``: None for one of its own. Raises ConfigError."""
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"metrics_file {str(path)!r} cannot be written ({error}): choose another file") from error
        self._path = path
        self._log = log or DaemonLog(logging.getLogger("dynamoth.balancer"), lambda: None)
        #: Whether the file ends within a line, as the disk was full.
        self._is_torn = False
        self._is_failing = False
        self.rows_written = 0
        self.rows_lost = 0

    def write(self, row: dict[str, Any]) -> None:
        """Append a row, or count it as lost."""
        line = (json.dumps(row, separators=(",", ":")) + "\n").encode()
        data = b"\n" + line if self._is_torn else line
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            self._lost(str(error))
            return
        if written < len(data):
            self._is_torn = self._is_torn or written > 0
            self._lost("no space left for a whole row")
            return
        self._is_torn = False
        self.rows_written += 1
        if self._is_failing:
            self._is_failing = False
            self._log.write(logging.INFO, "metrics are recorded again", file=str(self._path), rows_lost=self.rows_lost)

    def _lost(self, reason: str) -> None:
        self.rows_lost += 1
        if not self._is_failing:
            self._is_failing = True
            self._log.write(logging.ERROR, CANNOT, reason, file=str(self._path))

    def close(self) -> None:
        """Close the file; nothing can be written any more."""
        os.close(self._descriptor)
