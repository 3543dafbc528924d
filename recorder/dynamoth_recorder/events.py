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
    """The recording cannot be written any more, or can be written again."""

    failing: bool


RecorderEvent = LinkEvent | ServersChanged | StoreChanged


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table of ``dynamoth.recording``, without ``at`` and ``recorder``. Other columns left out are null."""

    table: str
    #: At least 1.
    count: int
    #: Columns with one value in all rows. They replace those of ``columns``.
    same: Mapping[str, Any]
    #: All others, each with ``count`` values.
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    #: How long ago ``at`` is, in seconds.
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """A link is up (``reason`` None), or down for another reason than the last time."""

    server: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A server does not let the recorder listen or probe there. Once per connection and reason."""

    server: str
    reply: str


RecorderNews = Rows | LinkChanged | Refused
"""What the machine asks of its process: to store rows, and to log the rest."""

RecorderAction = LinkAction | RecorderNews
