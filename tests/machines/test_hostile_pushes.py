"""10,000 hostile messages to each machine: none raises, and what is malformed is counted."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from dynamoth.machine.events import ErrorReply, Pushed, Replied
from dynamoth.names import AGENT_CHANNEL, ANNOUNCE_CHANNEL, CLIENTS_CHANNEL, forward_channel, replica_channel
from dynamoth.plan.plan import Plan
from dynamoth.protocol.control import pack_control
from dynamoth.protocol.envelope import CONTROL, MAGIC, SEQUENCE_MAX, seal
from dynamoth_dispatcher.events import LOCAL
from tests.core.strategies import control_messages, lies_about_length, mutations, nests, well_formed_nonsense
from tests.examples import examples
from tests.machines.agent import Agent
from tests.machines.helpers import ACTIVE, PLAN_0, PREPARED, SETTLED, C
from tests.machines.listener import Listener
from tests.machines.publisher import INBOX, Publisher

SEEDS = 8
MUTANTS = 5
"""Of each message: itself, and others in which a byte was changed. Cheaper to make than messages from nothing."""
EXAMPLES = 5_000 // (SEEDS * MUTANTS)

edges = st.sampled_from((0, 1, 2, 3, 2**31, 2**32 - 1, 2**63, 2**64 - 2, 2**64 - 1))
flags = st.integers(0, 255)
sequences = st.sampled_from((0, 1, 2, 3, 2**31, 2**32, SEQUENCE_MAX - 1, SEQUENCE_MAX))
epochs = st.sampled_from((0, 1, 2, 3, 2**31, 2**32 - 1))

controls = st.one_of(
    control_messages.map(pack_control),
    mutations(control_messages.map(pack_control)),
    well_formed_nonsense,
    nests(),
    lies_about_length(),
)
envelopes = st.one_of(
    st.builds(seal, edges, sequences, epochs, st.binary(max_size=4) | controls, flags),
    st.builds(seal, edges, sequences, epochs, controls, st.just(CONTROL)),
)
messages = st.one_of(envelopes, mutations(envelopes), st.binary(max_size=40), st.binary(max_size=30).map(MAGIC.__add__))
kinds = st.sampled_from((b"subscribe", b"unsubscribe", b"psubscribe", b"invalidate", b"pong"))


def mutants(data: bytes, random: Random) -> list[bytes]:
    made = [data]
    for _ in range(MUTANTS - 1):
        changed = bytearray(data)
        if changed:
            changed[random.randrange(len(changed))] = random.randrange(256)
        made.append(bytes(changed))
    return made


@st.composite
def batches(draw: st.DrawFn, channels: tuple[bytes, ...], data: st.SearchStrategy[bytes], kind: bytes) -> Any:
    """A batch of pushes of one kind, with acknowledgements of SUBSCRIBE and the like among them."""
    head = [b"pmessage", b"*"] if kind == b"pmessage" else [kind]
    random = Random(draw(st.integers(0, 2**32)))
    batch: list[list[Any]] = []
    for seed in draw(st.lists(data, min_size=SEEDS, max_size=SEEDS)):
        batch += [[*head, random.choice(channels), mutant] for mutant in mutants(seed, random)]
        batch.append([draw(kinds), C, 1])
    return batch


hostile = examples(EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
plans = st.sampled_from((PLAN_0, PREPARED, ACTIVE, SETTLED))
replies = st.one_of(
    st.none(),
    st.lists(st.none() | st.binary(max_size=20), max_size=4),
    st.builds(ErrorReply, st.just("LOADING")),
    well_formed_nonsense.map(lambda data: [b"1", None, data]),
)


def answer_nonsense(subject: Any, actions: list[Any], value: Any) -> None:
    """Answer every reading of a plan with ``value``."""
    for send in actions:
        if getattr(send, "args", (b"",))[0] in (b"HMGET", b"HGETALL"):
            subject.tell(Replied(send.link, send.tag, value))


@hostile
@given(batches((C, replica_channel(C, 1), b"other"), messages, b"message"), plans, replies)
def test_subscriber(batch: Any, plan: Plan, value: Any) -> None:
    listener = Listener().confirmed()
    actions = listener.tell(Pushed("s1", batch))
    answer_nonsense(listener, actions, value)
    listener.verify(actions, plan)
    listener.pass_time(3)
    listener.down("s1")
    listener.verify(listener.up("s1"), plan)
    listener.pass_time(3)


@hostile
@given(batches((INBOX, CLIENTS_CHANNEL), controls, b"message"), replies)
def test_publisher(batch: Any, value: Any) -> None:
    publisher = Publisher().connected("s1", "s2")
    publisher.publish()
    answer_nonsense(publisher, publisher.tell(Pushed("s1", batch)), value)
    publisher.publish()
    publisher.down("s1")
    publisher.up("s1")
    publisher.publish()
    publisher.pass_time(20)


@hostile
@given(
    batches(
        (C, replica_channel(C, 1), b"other", b"__dynamoth__:r:", ANNOUNCE_CHANNEL, AGENT_CHANNEL), messages, b"pmessage"
    ),
    batches((AGENT_CHANNEL,), controls, b"message"),
    batches((forward_channel(replica_channel(C, 1)), ANNOUNCE_CHANNEL), controls, b"pmessage"),
    st.sampled_from(("s1", "s2", "s3")),
    plans,
    replies,
)
def test_dispatcher(observed: Any, heard: Any, asked: Any, server: str, plan: Plan, value: Any) -> None:
    agent = Agent(server)
    agent.up(LOCAL)
    agent.tell(Pushed(LOCAL, observed[:5]))
    agent.tell(Replied(LOCAL, ("plan",), value if not isinstance(value, list) else {}))
    agent.pass_time(1)
    agent.read(plan)
    agent.tell(Pushed(LOCAL, observed))
    agent.tell(Pushed(LOCAL, heard))
    agent.tell(Pushed(LOCAL, asked))
    agent.tell(Pushed(LOCAL, observed))
    agent.pass_time(10)
    agent.listeners(agent.pass_time(0.3), 0)
