"""The decisions of this process, and what came of them: load ratios before, predicted and measured.

Theory of operation
-------------------
A decision predicts the load ratio of each server that it touches. When the last of its moves has settled, and the
averages no longer rest on reports from before that (``averaging_s`` later), these servers are measured. So each
prediction can be compared with what came of it. A decision whose moves another balancer completes is not measured.

The latest moves of each channel are remembered as well, whoever made them: a decision or an administrator.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamoth.plan.plan import Assignment
from dynamoth_balancer.decide.cluster import Decision, Move, Ratios

DECISIONS_KEPT_MAX = 20
"""Bound of the decisions that are kept for people."""

UNMEASURED_MAX = 100
"""Bound of the decisions whose outcome will be measured; the oldest are given up."""

CHANNELS_KEPT_MAX = 10_000
"""Bound of the channels whose latest moves are remembered; the one that moved longest ago is forgotten first."""

MOVES_PER_CHANNEL_MAX = 5
"""Bound of the moves that are remembered for one channel."""

BY_ADMINISTRATOR = "administrator"
"""In the place of a goal: an administrator wanted the move."""

FAILOVER = "failover"
"""In the place of a goal: the servers of the channel had died."""

ROLLBACK = "rollback"
"""In the place of a goal: the move was undone, as an agent that it needed had failed."""


class Progress(enum.Enum):
    """How far a decision has come."""

    PREVIEW = "preview"
    """It was only looked at."""
    NO_MOVES = "no moves"
    """It has only findings."""
    REFUSED = "refused"
    """Its moves could not begin."""
    IN_TRANSITION = "in transition"
    SETTLED = "settled"
    """All moves have settled, and the averages still rest on earlier reports."""
    MEASURED = "measured"
    NOT_MEASURED = "not measured"
    """This process lost the lease meanwhile, or there were too many decisions."""


@dataclass(slots=True)
class MadeDecision:
    """A decision, and what came of it."""

    #: Counts the decisions of this process, from 1.
    number: int
    at: float
    decision: Decision
    #: Load ratios of each server that it touches: before the first move, and predicted after the last one.
    ratios: Mapping[str, Ratios] = field(init=False)
    progress: Progress = field(init=False)
    #: Why its moves could not begin; empty when they have begun.
    refused: str = ""
    #: The load ratios of these servers once they are measured; None for one that could not be.
    measured: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    #: Its channels that have not settled.
    unsettled: set[bytes] = field(init=False)
    #: When to measure; None while some channels have not settled.
    due: float | None = None

    def __post_init__(self) -> None:
        """Add up the moves."""
        self.unsettled = {move.channel for move in self.decision.moves}
        self.progress = Progress.IN_TRANSITION if self.unsettled else Progress.NO_MOVES
        self.ratios = ratios_of(self.decision.moves)


def ratios_of(moves: Iterable[Move]) -> dict[str, Ratios]:
    """Return the load ratios of each server that moves touch: before the first one, and after the last one."""
    touched: dict[str, Ratios] = {}
    for move in moves:
        for server, ratios in move.ratios.items():
            touched[server] = Ratios(touched.get(server, ratios).before, ratios.after)
    return touched


class PastMove(NamedTuple):
    """A move of one channel that has begun."""

    at: float
    before: Assignment
    after: Assignment
    #: The name of the goal that proposed it, or ``BY_ADMINISTRATOR``.
    goal: str
    reason: str


class History:
    """The latest decisions and moves. Each decision is measured once, ``averaging_s`` after its last move settled."""

    def __init__(self, averaging_s: float) -> None:
        self._averaging_s = averaging_s
        #: Oldest first.
        self.decisions: deque[MadeDecision] = deque(maxlen=DECISIONS_KEPT_MAX)
        self._made = 0
        self._unmeasured: deque[MadeDecision] = deque()
        #: By channel or slot, oldest move first; the channel that moved longest ago is the first one.
        self._moves: OrderedDict[bytes, deque[PastMove]] = OrderedDict()

    def add(self, decision: Decision, now: float) -> MadeDecision:
        """Add a decision whose moves begin now."""
        self._made += 1
        made = MadeDecision(self._made, now, decision)
        self.decisions.append(made)
        if decision.moves:
            self._unmeasured.append(made)
            if len(self._unmeasured) > UNMEASURED_MAX:
                _give_up(self._unmeasured.popleft())
        return made

    def refuse(self, made: MadeDecision, reason: str) -> None:
        """Note that the moves of a decision cannot begin."""
        made.refused, made.progress = reason, Progress.REFUSED
        self._unmeasured.remove(made)

    def on_settled(self, channels: Iterable[bytes], now: float) -> None:
        """Note settled changes. A decision whose last change this was is due ``averaging_s`` later."""
        settled = frozenset(channels)
        for made in self._unmeasured:
            made.unsettled -= settled
            if made.due is None and not made.unsettled:
                made.due, made.progress = now + self._averaging_s, Progress.SETTLED

    def measure(self, load_ratio: Callable[[str, float], float | None], now: float) -> list[MadeDecision]:
        """Measure the decisions that are due, and return them."""
        due = [made for made in self._unmeasured if made.due is not None and made.due <= now]
        for made in due:
            self._unmeasured.remove(made)
            made.measured = {server: load_ratio(server, now) for server in made.ratios}
            made.progress = Progress.MEASURED
        return due

    def end_term(self) -> None:
        """Give up measuring: another balancer may lead, and decide."""
        while self._unmeasured:
            _give_up(self._unmeasured.popleft())

    # Moves of channels.

    def add_move(self, channel: bytes, move: PastMove) -> None:
        """Remember a move that has begun."""
        moves = self._moves.pop(channel, None) or deque[PastMove](maxlen=MOVES_PER_CHANNEL_MAX)
        moves.append(move)
        self._moves[channel] = moves
        if len(self._moves) > CHANNELS_KEPT_MAX:
            self._moves.popitem(last=False)

    def moves_of(self, channel: bytes) -> list[PastMove]:
        """Return the latest moves of a channel or slot, oldest first; none where they are forgotten."""
        return list(self._moves.get(channel, ()))

    def check(self) -> None:
        """Assert that what waits for its outcome is bounded and can still be measured."""
        assert len(self._unmeasured) <= UNMEASURED_MAX, f"{len(self._unmeasured)} decisions are not measured"
        for made in self._unmeasured:
            assert (made.due is None) == bool(made.unsettled), f"decision {made.number} is due {made.due}"
            assert made.progress in (Progress.IN_TRANSITION, Progress.SETTLED), f"{made.number} is {made.progress}"


def _give_up(made: MadeDecision) -> None:
    made.progress = Progress.NOT_MEASURED
