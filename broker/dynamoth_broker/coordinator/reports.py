"""The reports of brokers, and the model of one decision that is made of them.

A coordinator never has every user. Brokers report totals, their busiest interests, and how the loads of their users are
distributed. When users have to leave a broker, the coordinator asks it for candidates, and the broker chooses from its
present state. Reports and answers are bounded, whatever the number of users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import inf

from dynamoth.edge.control import INTERESTS_MAX as INTERESTS_MAX
from dynamoth.edge.control import USER_LOAD_CLASSES as USER_LOAD_CLASSES
from dynamoth.edge.control import BrokerReport as BrokerReport
from dynamoth.edge.control import Candidate as Candidate
from dynamoth.edge.control import Candidates as Candidates
from dynamoth.edge.control import InterestColumns as InterestColumns
from dynamoth_broker.coordinator.model import LoadModel, Standing

ANY_LOAD = inf
"""The load to ask for where a broker should offer the largest number of candidates."""


def user_load_class(load: float) -> int:
    """Return the class of a user's load: 0 below 1 byte/s, then one per power of two."""
    return min(USER_LOAD_CLASSES - 1, int(load).bit_length())


def users_for(load: float, user_loads: Sequence[int]) -> int:
    """Estimate how many users have a load together, the heaviest first, from the classes of a report."""
    count = 0
    for number in range(len(user_loads) - 1, -1, -1):
        each = 1.5 * 2 ** (number - 1)  # the middle of the class
        if user_loads[number] * each >= load:
            return count + int(load / each) + 1
        count += user_loads[number]
        load -= user_loads[number] * each
    return count


# What brokers compute.


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
    """Choose users who together have twice a load in bytes/s, but at most so many: ``bounds`` has both.

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


# What the coordinator computes.


@dataclass(frozen=True, slots=True)
class Total:
    """A broker in the model of a decision: its latest report, and the load in bytes/s to go by."""

    report: BrokerReport
    standing: Standing
    load: float


def build_model(
    totals: Iterable[Total],
    answers: Collection[Candidates] = (),
    *,
    connection_bytes_per_s: float = 0.0,
    shared: bool = False,
) -> LoadModel:
    """Return the model of one decision.

    Where another resource than bytes is the tightest, the capacity is lowered so that the load ratio is the use of that
    resource: it is taken to change as the load does.

    Args:
        totals: the brokers.
        answers: candidates of some of them. Those of brokers that are not among ``totals`` are ignored.
        connection_bytes_per_s: the weight of a user besides its interests; 0: none.
        shared: count the users of all reported interests, not only of those that candidates have: for placement.

    """
    model = LoadModel(connection_bytes_per_s)
    listed = list(totals)
    for total in listed:
        report = total.report
        load = total.load + connection_bytes_per_s * report.users
        capacity = report.capacity_bytes_per_s
        if report.other_ratio_max > load / capacity and load > 0:
            capacity = load / report.other_ratio_max
        model.add_broker(report.broker, capacity, standing=total.standing, location=report.location)
        model.set_totals(report.broker, load=load, inbound=report.inbound_bytes_per_s, users=report.users)
    known = [answer for answer in answers if answer.broker in model.brokers]
    wanted = {interest for answer in known for interest in answer.interests.ids}
    columns = [(total.report.broker, total.report.interests) for total in listed]
    rates: dict[str, float] = {}
    for broker, interests in [*columns, *((answer.broker, answer.interests) for answer in known)]:
        for interest, rate, users in zip(interests.ids, interests.rates, interests.users, strict=True):
            if (shared or interest in wanted) and users > 0:
                model.set_count(broker, interest, users)
                rates[interest] = max(rate, rates.get(interest, 0.0))
    model.set_rates(rates)
    for answer in known:
        _introduce(model, answer)
    return model


def _introduce(model: LoadModel, answer: Candidates) -> None:
    """Add candidates; a broker has at least as many users of an interest as its candidates are."""
    broker = model.brokers[answer.broker]
    held: Counter[str] = Counter()
    for candidate in answer.users:
        if candidate.user not in model.users:  # it is between two brokers, and both have offered it
            model.introduce(candidate.user, answer.broker, candidate.interests)
            held.update(model.users[candidate.user].interests)
    for interest, users in held.items():
        if broker.counts.get(interest, 0) < users:
            model.set_count(broker.id, interest, users)
    broker.users = max(broker.users, len(broker.known))
