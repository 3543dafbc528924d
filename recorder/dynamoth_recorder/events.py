"""The events and actions of a recorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamoth.machine.events import LinkAction, LinkEvent
from dynamoth.plan.plan import Server


@dataclass(frozen=True, slots=True)
class ServersChanged:
    """The servers of the cluster, with credentials in their URLs where they need their own."""

    servers: tuple[Server, ...]


@dataclass(frozen=True, slots=True)
class StoreChanged:
    """The recording can no longer be written (``failing``), or it can be written again.

    ``lost`` has the rows that were lost meanwhile, by table.
    """

    failing: bool
    lost: Mapping[str, int] = field(default_factory=dict[str, int])


RecorderEvent = LinkEvent | ServersChanged | StoreChanged


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table of ``dynamoth.recording``, without ``at`` and ``recorder``. Other missing columns are null."""

    table: str
    #: At least 1.
    count: int
    #: Columns that have one value in all rows. They replace those of ``columns``.
    same: Mapping[str, Any]
    #: Columns with ``count`` values each.
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    #: How long before the present ``at`` is, in seconds.
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """A link is up (``reason`` None), or it is down for a new reason."""

    server: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A server does not let the recorder listen or probe there. Once per connection and reason, while it lasts."""

    server: str
    reply: str


RecorderNews = Rows | LinkChanged | Refused
"""Actions for the process: it stores rows and logs the others."""

RecorderAction = LinkAction | RecorderNews
