from __future__ import annotations

from typing import Any

import pytest

from dynamoth.machine.events import ErrorReply, Replied, Send
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth_agent.events import AlreadyRunning, GuardRefused, HungAgentReplaced
from dynamoth_agent.guard import CHECK_INTERVAL_S, HUNG_INTERVALS, AgentGuard


def line(id_: int, name: str, age_s: int = 60) -> str:
    """Return a line of CLIENT LIST as Redis 7.0 writes it."""
    return (
        f"id={id_} addr=127.0.0.1:5{id_} laddr=127.0.0.1:6379 fd=8 name={name} age={age_s} idle=0 flags=P db=0 sub=1"
        " psub=1 ssub=0 multi=-1 qbuf=0 qbuf-free=20474 argv-mem=10 multi-mem=0 rbs=1024 rbp=0 obl=0 oll=0 omem=0"
        " tot-mem=22426 events=r cmd=psubscribe user=default redir=-1 resp=3\n"
    )


def name_of(server: str, incarnation: int) -> str:
    return AgentGuard(server, incarnation, 1.0, lambda: None).connection_name


class Bench:
    """One guard, and a server whose answers are chosen."""

    def __init__(self, others: str | None = None, server: str = "s1") -> None:
        """Begin alone, or beside ``others``: what CLIENT LIST says of them."""
        #: Why it does not see what is published.
        self.blind: str | None = None
        self.guard = AgentGuard(server, 7, 1.0, lambda: self.blind)
        self.others = others
        self.refused: set[bytes] = set()
        self.sent: list[tuple[Any, ...]] = []
        self.said: list[Any] = []
        self.now = 0.0

    def execute(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert action.link == "local"
                args = tuple(action.args)
                self.sent.append(args)
                self.execute(self.guard.on_reply(Replied("local", action.tag, self.answer(args)), self.now))
            else:
                self.said.append(action)

    def answer(self, args: tuple[Any, ...]) -> Any:
        if args[1] in self.refused:
            return ErrorReply("NOPERM no permissions")
        match args:
            case (b"CLIENT", b"SETNAME", _):
                return b"OK"
            case (b"CLIENT", b"ID"):
                return 20
            case (b"PUBSUB", b"NUMSUB", channel):
                return [channel, 1 if self.others is None else 2]
            case (b"CLIENT", b"LIST", b"TYPE", b"pubsub"):
                return (self.others or "").encode()
            case (b"CLIENT", b"KILL", b"ID", 10):
                self.others = None
                return 1
            case _:
                raise AssertionError(args)

    def connect(self, now: float = 0.0) -> None:
        self.now = now
        self.execute(self.guard.introduce())
        self.execute(self.guard.check(now))

    def hear(self, channel: bytes) -> None:
        """Let the guard see a message at the server."""
        self.execute(self.guard.on_pushes([[b"pmessage", b"*", channel, b"data"]]))

    def let_pass(self, seconds: float) -> None:
        """Let time pass, and the guard look whenever it wants to."""
        until = self.now + seconds
        while (deadline := self.guard.deadline()) is not None and deadline <= until:
            self.now = deadline
            self.execute(self.guard.tick(deadline))
        self.now = until


def test_an_agent_that_is_alone_asks_for_no_list() -> None:
    bench = Bench()
    bench.connect()
    introduced = [(b"CLIENT", b"SETNAME", name_of("s1", 7)), (b"CLIENT", b"ID")]
    assert bench.sent == [*introduced, (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL)]
    assert bench.said == []


def test_the_later_of_two_agents_ends_and_says_what_to_do() -> None:
    bench = Bench(line(3, "") + line(10, name_of("s1", 6)) + line(20, name_of("s1", 7)))
    bench.connect()
    assert not bench.said and not bench.guard.is_clear, "the other one may hang"
    bench.let_pass(HUNG_INTERVALS - 0.1)
    bench.hear(b"news")
    assert not bench.said
    bench.hear(BALANCER_CHANNEL)
    (said,) = bench.said
    assert isinstance(said, AlreadyRunning)
    for part in ("'s1'", "connection 10", "127.0.0.1:510", "60 s", "stop the other first"):
        assert part in said.reason
    assert not bench.guard.is_clear


def test_a_later_agent_takes_the_place_of_one_that_hangs() -> None:
    bench = Bench(line(10, name_of("s1", 6)) + line(20, name_of("s1", 7)))
    bench.connect()
    bench.let_pass(HUNG_INTERVALS - 0.1)
    bench.hear(b"news")
    assert not bench.said
    bench.let_pass(0.1)
    assert (b"CLIENT", b"KILL", b"ID", 10) in bench.sent
    [said] = bench.said
    assert isinstance(said, HungAgentReplaced)
    assert "no report for 5 s (connection 10 from 127.0.0.1:510): end its process" in said.reason
    assert bench.guard.is_clear
    bench.hear(BALANCER_CHANNEL)  # our own report
    assert bench.said == [said]


def test_a_blind_agent_replaces_none_as_it_sees_no_reports() -> None:
    bench = Bench(line(10, name_of("s1", 6)))
    bench.blind = "NOPERM"
    bench.connect()
    bench.let_pass(HUNG_INTERVALS)
    assert [type(said) for said in bench.said] == [AlreadyRunning]
    assert not any(b"KILL" in args for args in bench.sent)


def test_an_agent_that_may_not_close_a_connection_ends_and_says_what_to_permit() -> None:
    bench = Bench(line(10, name_of("s1", 6)))
    bench.refused.add(b"KILL")
    bench.connect()
    bench.let_pass(HUNG_INTERVALS)
    [said] = bench.said
    assert isinstance(said, AlreadyRunning)
    assert "NOPERM" in said.reason and "permit +client|kill, or end the process of the other one" in said.reason
    assert not bench.guard.is_clear


def test_an_agent_at_work_closes_no_connection() -> None:
    """Of two that were each alone when they looked, the later one ends, whatever the other one does."""
    bench = Bench()
    bench.connect()
    bench.others = line(10, name_of("s1", 6))
    bench.let_pass(CHECK_INTERVAL_S)
    assert isinstance(bench.said[0], AlreadyRunning)
    assert not any(b"KILL" in args for args in bench.sent)


@pytest.mark.parametrize(
    "others",
    [
        line(30, name_of("s1", 6)),  # a later agent
        line(10, name_of("s1", 7)),  # an old connection of the same process
        line(1, "") + line(2, "dynamoth-agent") + line(3, "xdynamoth-agent:s1:1") + line(4, "name=dynamoth"),
    ],
    ids=["later", "own", "no agents"],
)
def test_an_agent_stays_beside_all_but_an_earlier_agent(others: str) -> None:
    bench = Bench(others + line(20, name_of("s1", 7)))
    bench.connect()
    assert bench.said == []


def test_the_agent_of_another_server_at_the_same_redis_is_a_mistake_in_the_configuration() -> None:
    bench = Bench(line(10, name_of("s 2/x", 6)))
    bench.connect()
    (said,) = bench.said
    assert isinstance(said, AlreadyRunning)
    assert "'s 2/x'" in said.reason and "own URL" in said.reason


@pytest.mark.parametrize("server", ["s1", "a b", "é:%", "x" * 64])
def test_any_id_of_a_server_makes_a_name_that_redis_takes(server: str) -> None:
    name = name_of(server, 2**63 - 1)
    assert all("!" <= character <= "~" for character in name)
    bench = Bench(line(10, name), server)
    bench.connect()
    bench.hear(BALANCER_CHANNEL)
    assert repr(server) in bench.said[0].reason


def test_it_looks_again_now_and_then() -> None:
    """Two agents that started at once may each have been alone when they looked."""
    bench = Bench()
    bench.connect(now=100.0)
    assert bench.guard.deadline() == 100.0 + CHECK_INTERVAL_S
    bench.execute(bench.guard.tick(100.0 + CHECK_INTERVAL_S / 2))
    assert len(bench.sent) == 3
    bench.others = line(10, name_of("s1", 6))
    bench.execute(bench.guard.tick(100.0 + CHECK_INTERVAL_S))
    assert isinstance(bench.said[0], AlreadyRunning)
    assert bench.guard.deadline() == 100.0 + 2 * CHECK_INTERVAL_S


def test_while_the_link_is_down_it_does_not_look() -> None:
    bench = Bench()
    bench.connect()
    bench.guard.link_down()
    assert bench.guard.deadline() is None
    assert bench.guard.tick(1e9) == []


@pytest.mark.parametrize("refused", [b"SETNAME", b"ID", b"NUMSUB", b"LIST"])
def test_a_server_that_refuses_is_said_once(refused: bytes) -> None:
    bench = Bench("")
    bench.refused.add(refused)
    bench.connect()
    bench.connect()
    (said,) = bench.said
    assert isinstance(said, GuardRefused)
    assert "NOPERM" in said.reason and "permit" in said.reason


@pytest.mark.parametrize("garbage", [None, b"x", 5, [], [b"a"], {b"a": 1}])
@pytest.mark.parametrize("subject", ["name", "id", "count", "list", "kill"])
def test_no_answer_makes_it_raise(subject: str, garbage: Any) -> None:
    guard = AgentGuard("s1", 1, 1.0, lambda: None)
    actions = guard.on_reply(Replied("local", ("guard", subject), garbage), 0.0)
    assert all(isinstance(action, Send) for action in actions)
