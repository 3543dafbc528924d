"""The reports of brokers, and the model of one decision that is made of them.

A coordinator never has every user. Brokers report totals, their busiest interests, and how the loads of their users are
distributed. When users have to leave a broker, the coordinator asks it for candidates, and the broker chooses from its
present state. Reports and answers are bounded, whatever the number of users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from dynamoth.edge.control import BrokerReport, Candidates
from dynamoth_broker.coordinator.model import LoadModel, Standing

ANY_LOAD = inf
"""The load to ask for where a broker should offer the largest number of candidates."""


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
