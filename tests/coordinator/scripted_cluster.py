"""A cluster for tests of the controller: its brokers know all their users, report, answer, and move users at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dynamoth.edge.control import BrokerReport, Candidates
from dynamoth_broker.candidates import busiest, choose_candidates, user_load_class
from dynamoth_broker.coordinator.controller import Controller, Stage
from dynamoth_broker.coordinator.events import (
    Answered,
    AskCandidates,
    ControllerAction,
    ControllerEvent,
    Decision,
    DecisionRecorded,
    MoveEnded,
    MoveUsers,
    Refused,
    Reported,
    Tick,
)
from dynamoth_broker.coordinator.model import BrokerLoad, LoadModel
from dynamoth_broker.coordinator.placement import LeastLoadedPlacement
from dynamoth_broker.coordinator.settings import CoordinatorSettings


def report_of(model: LoadModel, broker: BrokerLoad, interests_max: int = 1000) -> BrokerReport:
    """Return what a broker reports."""
    rates = {interest: model.rate(interest) for interest in broker.counts}
    classes = Counter(user_load_class(model.own_load(user.interests)) for user in broker.known.values())
    return BrokerReport(
        broker=broker.id,
        capacity_bytes_per_s=broker.capacity,
        load_bytes_per_s=broker.load - model.connection_bytes_per_s * broker.users,
        inbound_bytes_per_s=broker.inbound,
        users=broker.users,
        interests=busiest(rates, broker.counts, interests_max),
        user_loads=tuple(classes[number] for number in range(max(classes, default=-1) + 1)),
    )


def answer_of(model: LoadModel, ask: AskCandidates) -> Candidates:
    """Return the candidates of a broker."""
    broker = model.brokers[ask.broker]
    rates = {interest: model.rate(interest) for interest in broker.counts}
    users = ((user.id, user.interests) for user in broker.known.values())
    return choose_candidates(broker.id, users, rates, broker.counts, (ask.load, ask.users_max))


@dataclass
class ScriptedCluster:
    """Brokers and a controller in virtual time, one second per step."""

    model: LoadModel
    settings: CoordinatorSettings
    now: float = 0.0
    #: Brokers that neither report nor answer.
    silent: set[str] = field(default_factory=set)
    #: Makes a report, and changes it before it is sent.
    report_of: Callable[[LoadModel, BrokerLoad], BrokerReport] = report_of
    edit: Callable[[BrokerReport], BrokerReport] = replace
    #: Users who refuse to move; moves that never end.
    refusing: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)
    asks: list[AskCandidates] = field(default_factory=list)
    batches: list[MoveUsers] = field(default_factory=list)
    records: list[Decision] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = Controller(self.settings, LeastLoadedPlacement(), self.now)

    def send(self, event: ControllerEvent) -> None:
        """Give the controller an event, and do what it asks for."""
        actions = self.controller.handle(event, self.now)
        self.controller.check()
        for action in actions:
            self._execute(action)

    def _execute(self, action: ControllerAction) -> None:
        match action:
            case AskCandidates():
                self.asks.append(action)
                if action.broker not in self.silent:
                    self.send(Answered(action.request, answer_of(self.model, action)))
            case MoveUsers():
                self.batches.append(action)
                for move in action.moves:
                    if move.user not in self.stuck:
                        is_willing = move.user not in self.refusing
                        if is_willing:
                            self.model.move(move.user, move.target)
                        self.send(MoveEnded(move.user, is_willing))
            case DecisionRecorded():
                self.records.append(action.decision)
            case Refused():
                self.refusals.append(action.reason)

    def run(self, seconds: int) -> None:
        """Let time pass."""
        for _ in range(seconds):
            for broker in self.model.brokers.values():
                if broker.id not in self.silent:
                    self.send(Reported(self.edit(self.report_of(self.model, broker))))
            while self.controller.deadline() <= self.now:
                self.send(Tick())
            self.now += 1.0

    def run_until_decided(self, number: int = 1, seconds_max: int = 200) -> Decision:
        """Let time pass until a decision is made and its moves have ended; return the latest record of it."""
        for _ in range(seconds_max):
            self.run(1)
            if self.records and self.records[-1].number >= number and self.controller.stage is Stage.WATCHING:
                return self.records[-1]
        raise AssertionError(f"nothing was decided: {self.controller.explain(self.now)}")
