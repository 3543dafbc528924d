"""What a broker computes for the coordinator: its busiest interests, classes of user loads, users who may move.

All of it is pure, and bounded whatever the number of users.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nlargest

from dynamoth.edge.control import (
    CANDIDATE_BYTES_MAX,
    INTERESTS_MAX,
    USER_LOAD_CLASSES,
    Candidate,
    Candidates,
    InterestColumns,
)
from dynamoth.protocol.wire import ARRAY_MAX


def user_load_class(load: float) -> int:
    """Return the class of a user's load: 0 below 1 byte/s, then one per power of two."""
    return min(USER_LOAD_CLASSES - 1, int(load).bit_length())


def busiest(
    rates: Mapping[str, float], counts: Mapping[str, int], interests_max: int = INTERESTS_MAX
) -> InterestColumns:
    """Return the interests that a report names: those with the highest rates, as sharing them saves most."""
    chosen = nlargest(interests_max, counts, key=lambda interest: (rates.get(interest, 0.0), interest))
    return _columns(chosen, rates, counts)


def choose_candidates(
    broker: str,
    users: Iterable[tuple[str, tuple[str, ...]]],
    rates: Mapping[str, float],
    counts: Mapping[str, int],
    bounds: tuple[float, int],
) -> Candidates:
    """Choose users who together have twice a load. ``bounds`` has that load, in bytes/s, and how many users at most.

    Those with the highest loads come first, but none who is heavier than all that has to move. The places that are left
    go to other users, evenly from the heaviest to the lightest, for targets where those do not fit. An infinite load
    asks for the heaviest users. ``users`` has ids and interests, without those who may not move now.
    """
    load, users_max = bounds
    weights = {user: (sum([rates.get(each, 0.0) for each in theirs]), theirs) for user, theirs in users}
    ranked = sorted(weights, key=lambda user: (-weights[user][0], user))
    wanted, heavy, others = 2 * load, list[str](), list[str]()
    for user in ranked:
        if weights[user][0] <= load and wanted > 0 and len(heavy) < users_max:
            heavy.append(user)
            wanted -= weights[user][0]
        else:
            others.append(user)
    places = min(users_max - len(heavy), len(others))
    spread = [others[place * len(others) // places] for place in range(places)]
    chosen = [Candidate(user, weights[user][1]) for user in (*heavy, *spread)]
    held = dict.fromkeys(interest for candidate in chosen for interest in candidate.interests)
    return Candidates(broker, tuple(chosen), _columns(held, rates, counts))


def _columns(ids: Iterable[str], rates: Mapping[str, float], counts: Mapping[str, int]) -> InterestColumns:
    names = tuple(ids)
    return InterestColumns(
        names, tuple([rates.get(each, 0.0) for each in names]), tuple([counts.get(each, 0) for each in names])
    )


def bounded(candidates: Candidates) -> Candidates:
    """Leave out the last users of an answer that would be too large."""
    rates = dict(zip(candidates.interests.ids, candidates.interests.rates, strict=True))
    counts = dict(zip(candidates.interests.ids, candidates.interests.users, strict=True))
    users: list[Candidate] = []
    held: dict[str, None] = {}
    size = 0
    for candidate in candidates.users:
        new = [each for each in candidate.interests if each not in held]
        size += 4 * len(candidate.user) + 8 + 3 * len(candidate.interests) + 40 * len(new)
        if size > CANDIDATE_BYTES_MAX or len(held) + len(new) > ARRAY_MAX:
            break
        users.append(candidate)
        held.update(dict.fromkeys(new))
    return Candidates(candidates.broker, tuple(users), _columns(held, rates, counts))
