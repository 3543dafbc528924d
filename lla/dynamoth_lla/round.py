"""One round of a load analyzer: its stage, and its results so far."""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass, field

from dynamoth.machine.events import Send
from dynamoth_lla.channels import Track
from dynamoth_lla.digest import Digest
from dynamoth_lla.server_info import ServerInfo


@dataclass(frozen=True, slots=True)
class ObservationLate:
    """Action: the observation has become late (an alarm), or is in time again."""

    late: bool
    lag_s: float


LoadAnalyzerAction = Send | ObservationLate

Work = Generator[None, None, list[LoadAnalyzerAction]]
"""A task in steps, so that messages are forwarded in between; its result are the actions that follow."""


class Stage(enum.Enum):
    """How far a round has come."""

    RESTING = "resting"
    MEASURING = "measuring"
    ASKING = "asking"
    COMPOSING = "composing"


@dataclass(slots=True)
class Sample:
    """The server at the time at which it was asked."""

    at: float
    info: ServerInfo


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements of one round; only the subscribers are missing."""

    digested: Digest
    after: Sample
    interval_s: float
    publishers_uncounted: int


@dataclass(slots=True)
class Round:
    """The present round, or the latest one while RESTING."""

    stage: Stage = Stage.RESTING
    #: Grows with each round and each connection: replies to older commands are dropped.
    number: int = 0
    #: When the server was asked for INFO. Meaningful unless RESTING.
    asked_at: float = 0.0
    #: When the outstanding command was sent; None while there is none.
    waiting_since: float | None = None
    #: The task of MEASURING or COMPOSING that is under way; while there is one, the deadline is now.
    work: Work | None = None
    #: The replies of INFO.
    fields: dict[str, str] = field(default_factory=dict[str, str])
    #: Not None exactly while ASKING.
    measurement: Measurement | None = None
    #: Outstanding replies of NUMSUB; 0 unless ASKING.
    missing: int = 0
    #: Channels without messages whose subscribers are counted too; those without any are dropped after that.
    idle: list[Track] = field(default_factory=list[Track])

    def begin(self, now: float) -> None:
        """Begin the next round with a question to the server."""
        self.stage = Stage.MEASURING
        self.asked_at = self.waiting_since = now
        self.number += 1
        self.fields = {}

    def abandon(self) -> None:
        """Drop the round, as its connection is lost."""
        self.stage = Stage.RESTING
        self.waiting_since = None
        self.number += 1
        self.measurement = None
        self.missing = 0
        self.work = None

    def check(self) -> None:
        """Assert what the stage says about the rest."""
        stage = self.stage
        assert (self.measurement is not None) == (stage is Stage.ASKING), f"{stage} with {self.measurement}"
        assert self.missing >= 0 and (self.missing > 0) == (stage is Stage.ASKING), f"{self.missing} while {stage}"
        assert self.work is None or stage in (Stage.MEASURING, Stage.COMPOSING), f"work while {stage}"
        assert self.work is not None or stage is not Stage.COMPOSING, "nothing is composed"
        waits = stage is Stage.ASKING or (stage is Stage.MEASURING and self.work is None)
        assert (self.waiting_since is not None) == waits, f"waiting since {self.waiting_since} while {stage}"
