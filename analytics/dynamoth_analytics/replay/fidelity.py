"""How true a replay is: how the replay of the settings in force agrees with the recording, in figures and words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dynamoth.recording import channel_text
from dynamoth_analytics.replay.agreement import Agreement
from dynamoth_analytics.replay.recorded import Moved
from dynamoth_analytics.text import display_name

MOVES_SHOWN_MAX = 3
"""Moves of a decision that are shown."""


@dataclass(frozen=True, slots=True)
class DifferenceInWords:
    """A recorded decision that the replay does not make, or one that only the replay makes.

    ``recorded`` and ``replayed`` are the moves, empty for no decision.
    """

    at: float
    recorded: str
    replayed: str
    cause: str


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How a replay with the settings in force agrees with the recording."""

    #: Recorded decisions with moves, and how many of them the replay makes.
    recorded: int = 0
    same: int = 0
    #: Changes of administrators and of earlier balancers.
    followed: int = 0
    #: Recorded moves and overload, and those of the replay that was left to itself.
    moves: int = 0
    moves_replayed: int = 0
    overload_s: float = 0.0
    overload_s_replayed: float = 0.0
    differences: Sequence[DifferenceInWords] = ()

    @property
    def only_replayed_at(self) -> float | None:
        """When the replay would first have decided after the last recorded decision, in seconds; None: it would not."""
        return next((each.at for each in self.differences if not each.recorded), None)

    def to_json(self) -> str:
        """Return it as :func:`fidelity_from_json` reads it."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class NotReplayed:
    """The replay of the whole recording failed, so its fidelity is not known."""

    problem: str


def fidelity_from_json(text: str) -> Fidelity:
    """Return what :meth:`Fidelity.to_json` has written."""
    found = json.loads(text)
    differences = [DifferenceInWords(**each) for each in found.pop("differences")]
    return Fidelity(**found, differences=differences)


def fidelity(found: Agreement, moves_replayed: int, overload_s: float, overload_s_replayed: float) -> Fidelity:
    """Return the fidelity of a replay.

    Args:
        found: how the replay agrees step by step.
        moves_replayed: moves of the replay that was left to itself.
        overload_s: recorded overload, in seconds.
        overload_s_replayed: overload in the replay that was left to itself, in seconds.

    """
    differences = [
        DifferenceInWords(each.at, _in_words(each.recorded), _in_words(each.replayed), each.cause)
        for each in found.differences
    ]
    return Fidelity(
        found.recorded,
        found.same,
        found.followed,
        found.moves,
        moves_replayed,
        overload_s,
        overload_s_replayed,
        differences,
    )


def _in_words(moves: Sequence[Moved]) -> str:
    shown = [
        f"{display_name(channel_text(move.channel))}: {', '.join(move.before.servers)} to"
        f" {', '.join(move.after.servers)}"
        for move in moves[:MOVES_SHOWN_MAX]
    ]
    more = len(moves) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
