"""Messages that are published together: the same as one after the other, with fewer events and actions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamoth.machine.events import (
    Connect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    RepliedAll,
    Send,
    SendAll,
    Start,
)
from dynamoth.machine.outbox import Outbox
from dynamoth.names import AGENT_CHANNEL, inbox
from dynamoth.plan.plan import Assignment, Mode, Route, single
from dynamoth.protocol.control import RouteNotice, pack_control
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.events import (
    Publish,
    PublishAll,
    Published,
    PublishedAll,
    PublisherOptions,
    PublishFailed,
    PublishRefused,
)
from dynamoth_client.machines.publisher.machine import PublisherMachine
from tests.machines.helpers import PLAN_0, RUN, C, Subject, channel_at

ID = 0xABCD
CHANNELS = (C, channel_at("s1", 1), channel_at("s2"), channel_at("s3"))
SERVERS = ("s1", "s2", "s3")
ASSIGNMENTS = (
    *map(single, SERVERS),
    Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2")),
    Assignment(Mode.ALL_SUBSCRIBERS, SERVERS),
    Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3")),
)
OPTIONS = PublisherOptions(unanswered_max=7, observers_interval_s=0.5)


class Application(Subject):
    """Publishes at servers that answer on request; ``together`` says with which events."""

    def __init__(self, *, together: bool) -> None:
        super().__init__(PublisherMachine(ID, LocalPlan(PLAN_0), OPTIONS))
        self._together = together
        self.outcomes: dict[object, object] = {}
        #: What each server got, over all connections.
        self.got: dict[str, list[Sequence[Any]]] = {server: [] for server in SERVERS}
        self._unanswered: dict[str, deque[tuple[Sequence[Any], Any]]] = {server: deque() for server in SERVERS}
        self._tokens = 0
        self.batches = 0
        self.tell(Start())

    def tell(self, *events: Any) -> list[Any]:
        actions = super().tell(*events)
        for action in actions:
            if isinstance(action, Send):
                self._sent(action.link, [action.args], action.tag)
            elif isinstance(action, SendAll):
                self.batches += 1
                self._sent(action.link, action.commands, action.tag)
            elif isinstance(action, PublishedAll):
                self.outcomes.update(zip(action.tokens, action.receivers, strict=True))
            elif isinstance(action, Published):
                self.outcomes[action.token] = action.receivers
            elif isinstance(action, (PublishFailed, PublishRefused)):
                self.outcomes[action.token] = action
            else:
                assert isinstance(action, Connect)
        return actions

    def _sent(self, link: str, sent: Sequence[Sequence[Any]], tag: Any) -> None:
        self.got[link] += sent
        self._unanswered[link] += [(args, tag) for args in sent if tag is not None]

    def publish(self, channels: Sequence[int]) -> None:
        messages = [(self._tokens + n, CHANNELS[index], b"x%d" % n) for n, index in enumerate(channels)]
        self._tokens += len(channels)
        self.tell(*([PublishAll(messages)] if self._together else [Publish(*message) for message in messages]))

    def answer(self, server: str, observers: int, limit: int = 1000) -> None:
        """Let a server answer what it has got so far, at most so many commands."""
        held = self._unanswered[server]
        unanswered = deque(held.popleft() for _ in range(min(limit, len(held))))
        while unanswered:
            args, tag = unanswered.popleft()
            values = [_reply(args, observers)]
            while self._together and isinstance(tag, Outbox) and unanswered and unanswered[0][1] is tag:
                values.append(_reply(unanswered.popleft()[0], observers))
            self.tell(RepliedAll(server, tag, values) if len(values) > 1 else Replied(server, tag, values[0]))

    def lose(self, server: str) -> None:
        self._unanswered[server].clear()
        self.tell(LinkDown(server, "reset by peer"))

    def reconnect(self, server: str) -> None:
        """Connect again; a link that is up goes down first."""
        self.lose(server)
        self.tell(LinkUp(server, RUN))


def _reply(args: Sequence[Any], observers: int) -> Any:
    if args[0] == b"HMGET":
        return [b"0", RUN.encode(), None]
    if args[0] == b"PUBSUB":
        return [AGENT_CHANNEL, observers]
    if args[2].endswith(b"x3"):
        return ErrorReply("OOM")
    return 1 if args[2].endswith(b"x4") else 2


steps = st.one_of(
    st.tuples(st.just("publish"), st.lists(st.integers(0, len(CHANNELS) - 1), min_size=1, max_size=6)),
    st.tuples(st.just("answer"), st.sampled_from(SERVERS), st.integers(0, 1), st.sampled_from([1, 3, 1000])),
    st.tuples(st.sampled_from(["lose", "reconnect"]), st.sampled_from(SERVERS)),
    st.tuples(st.just("move"), st.integers(0, len(CHANNELS) - 1), st.sampled_from(ASSIGNMENTS), st.integers(1, 5)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.01, 0.6, 1.5, 10.5])),
)


@given(st.lists(steps, max_size=30))
def test_together_is_the_same_as_one_after_the_other(script: list[tuple[Any, ...]]) -> None:
    """Every server gets the same commands in the same order, and the application the same outcomes."""
    applications = [Application(together=together) for together in (False, True)]
    for application in applications:
        for server in SERVERS:
            application.publish(
                [next(index for index, name in enumerate(CHANNELS) if PLAN_0.ring.home(name) == server)]
            )
            application.tell(LinkUp(server, RUN))
            application.answer(server, 1)
        end: list[tuple[Any, ...]] = [("reconnect", server) for server in SERVERS]
        end += [*(("answer", server, 1) for server in SERVERS), ("publish", [0, 1, 2, 3, 0])]
        for step in [*script, *end]:
            match step:
                case ("publish", channels):
                    application.publish(channels)
                case ("answer", server, observers, *limit):
                    application.answer(server, observers, *limit)
                case ("lose", server):
                    application.lose(server)
                case ("reconnect", server):
                    application.reconnect(server)
                case ("move", int(index), Assignment() as assignment, int(epoch)):
                    notice = pack_control(RouteNotice(CHANNELS[index], Route(epoch, assignment)))
                    application.tell(Pushed("s1", [[b"message", inbox(ID), notice]]))
                case _:
                    application.pass_time(step[1])
    one_by_one, together = applications
    assert one_by_one.got == together.got
    assert one_by_one.outcomes == together.outcomes
    assert one_by_one.batches == 0


def test_what_needs_nothing_else_goes_out_together() -> None:
    application = Application(together=True)
    for server in SERVERS:
        application.publish([("s1", "", "s2", "s3").index(server)])
        application.tell(LinkUp(server, RUN))
        application.answer(server, 1)
    before = {server: len(got) for server, got in application.got.items()}
    application.publish([0, 2, 0, 2, 2, 3])
    assert {server: len(got) - before[server] for server, got in application.got.items()} == {"s1": 2, "s2": 3, "s3": 1}
    assert application.batches == 3
    application.answer("s2", 1)
    assert [application.outcomes[token] for token in (4, 6, 7)] == [1, PublishRefused(6, "OOM"), 0]
    assert 3 not in application.outcomes
