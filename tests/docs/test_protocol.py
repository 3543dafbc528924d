"""``docs/protocol.md`` says what the code does: its examples, tables and numbers, and a client made from it."""

from __future__ import annotations

import math
import re
from typing import Any, cast, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth import names
from dynamoth.errors import MalformedMessage
from dynamoth.globs import physical_patterns
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import JOIN_S, Entry, Mode, Phase, Plan, Route, single
from dynamoth.plan.ring import Ring
from dynamoth.plan.slots import slot_name, slot_of
from dynamoth.protocol import control, envelope, records, reports, stored_plan, wire
from dynamoth.protocol.plan_wire import entry_to_wire, pack_entry, route_to_wire, unpack_entry
from dynamoth_balancer.options import BalancerOptions
from dynamoth_client.machines import sequences
from dynamoth_client.machines.patterns.events import PatternOptions
from dynamoth_client.machines.publisher.checks import READ_AGAIN_S
from dynamoth_client.machines.publisher.events import PublisherOptions
from dynamoth_client.machines.standalone import FRESH_S
from dynamoth_client.machines.subscriber.events import SubscriberOptions
from dynamoth_dispatcher.options import DispatcherOptions, TransitionOptions
from tests.core.strategies import PLAN_0, channels, control_messages, entries, plans, routes
from tests.docs import second_client as second
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "protocol.md"
TEXT = PAGE.read_text()

ids = st.integers(0, 2**64 - 1)
flags = st.integers(0, 0x3F)


def table(heading: str) -> list[list[str]]:
    """Return the rows of the first table that begins with this heading, without the heading."""
    [_, found] = TEXT.split(f"| {heading} |", 1)
    rows: list[list[str]] = []
    for line in found.splitlines()[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def examples(beginning: str) -> list[bytes]:
    """Return the bytes of the one example of the page that begins so, line by line."""
    [text] = [block.text for block in blocks(PAGE) if block.text.startswith(beginning)]
    return [bytes.fromhex(line) for line in text.splitlines()]


def route_of(route: Route) -> list[Any]:
    return [route.epoch, route.assignment.mode.value, list(route.assignment.servers)]


def entry_of(entry: Entry) -> list[Any]:
    return [entry.phase.value, route_of(entry.route), [route_of(route) for route in entry.previous]]


# Names.


def test_names() -> None:
    documented = {row[0].strip("`").encode() for row in table("name | what it is")}
    fixed = {
        *(names.PLAN_KEY, names.PLAN_KEY_NEW, names.BALANCER_LEASE_KEY, names.TERM_KEY),
        *(names.AGENT_CHANNEL, names.BALANCER_CHANNEL, names.RECORD_CHANNEL, names.OPERATOR_CHANNEL),
        *(names.ANNOUNCE_CHANNEL, names.CLIENTS_CHANNEL),
    }
    made = {
        names.INBOX_PREFIX + b"CLIENT",
        names.OPERATOR_INBOX_PREFIX + b"REQUEST",
        names.RECORDER_PREFIX + b"ID",
        names.REPLICA_PREFIX + b"EPOCH:CHANNEL",
        names.SHARDED_PREFIX + b"CHANNEL",
        names.SHARDED_REPLICA_PREFIX + b"EPOCH:CHANNEL",
        names.PATTERN_PREFIX + b"PATTERN",
        names.FORWARD_PREFIX + b"r:EPOCH:CHANNEL",
        names.RELAY_PREFIX + b"PHYSICAL",
        names.SLOT_PREFIX + b"NNNN",
    }
    assert documented == fixed | made


@given(ids, st.integers(0, 2**32 - 1), channels, st.booleans())
def test_names_are_made_as_documented(number: int, epoch: int, channel: bytes, sharded: bool) -> None:
    assert second.inbox(number) == names.inbox(number)
    assert second.operator_inbox(number) == names.operator_inbox(number)
    name = names.sharded_channel(channel) if sharded else channel
    physical = second.replica(name, epoch)
    assert physical == names.replica_channel(name, epoch)
    assert second.forward_request(physical) == names.forward_channel(physical)
    assert second.relay(physical) == names.relay_channel(physical)


def test_sharded_replica_of_the_page() -> None:
    assert f"`{names.replica_channel(b'__dynamoth__:s:news', 0x2A).decode()}`" in TEXT


# Envelopes.


def test_the_example_envelope() -> None:
    [example] = examples("d7 0d 01 02")
    expected = second.Envelope(second.FIRST, 0x0123456789ABCDEF, 42, 1500, 7, b"hello")
    assert second.unseal(example) == expected
    assert envelope.seal(0x0123456789ABCDEF, 42, 7, b"hello", envelope.FIRST, 1500) == example


def test_flags() -> None:
    documented = {row[1]: int(row[0].strip("`"), 16) for row in table("flag | name | meaning")}
    assert documented == {name: getattr(envelope, name) for name in documented}
    assert sum(documented.values()) == envelope.KNOWN_FLAGS


@given(flags, ids, st.integers(0, 2**48 - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.binary())
def test_envelopes_are_those_of_the_page(
    flag: int, publisher: int, number: int, quiet_ms: int, epoch: int, payload: bytes
) -> None:
    ours = envelope.seal(publisher, number, epoch, payload, flag, quiet_ms)
    theirs = second.Envelope(flag, publisher, number, quiet_ms, epoch, payload)
    assert second.seal(theirs) == ours
    assert second.unseal(ours) == theirs
    assert envelope.open_envelope(ours) == envelope.Envelope(flag, publisher, number, epoch, payload, quiet_ms)


@given(st.binary(max_size=30) | st.binary(max_size=30).map(lambda rest: envelope.MAGIC + rest))
def test_what_is_no_envelope(data: bytes) -> None:
    if not envelope.is_enveloped(data):
        assert second.unseal(data) is None
        return
    try:
        opened = envelope.open_envelope(data)
    except MalformedMessage:
        with pytest.raises(ValueError, match="malformed"):
            second.unseal(data)
    else:
        assert second.unseal(data) is not None
        assert cast("second.Envelope", second.unseal(data)).sequence == opened.sequence


# The ring, and where a route leads.


def test_vectors_of_the_ring() -> None:
    vectors = table("servers | points each | channel | home")
    assert len(vectors) >= 7
    for servers, points, channel, home in vectors:
        name = channel.strip("`").encode()
        assert Ring(servers.split(), int(points)).home(name) == home
        assert second.ring_home(servers.split(), int(points), name) == home


@given(routes, channels, ids, st.booleans())
def test_routes_lead_where_the_page_says(route: Route, channel: bytes, client: int, sharded: bool) -> None:
    name = names.sharded_channel(channel) if sharded else channel
    wire_form = route_of(route)
    assert wire_form == route_to_wire(route)
    for ours, theirs in (
        (route.locations(name), second.locations(wire_form, name)),
        (route.published_at(client, name), second.publishes_at(wire_form, name, client)),
        (route.listened_at(client, name), second.listens_at(wire_form, name, client)),
    ):
        assert [(place.server, place.physical) for place in ours] == theirs


# The stored plan.


def test_the_example_entry() -> None:
    [example] = examples("93 02 93 07")
    assert msgpack.unpackb(example) == [second.ACTIVE, [7, 3, ["s1", "s2"]], [[3, 1, ["s1"]]]]
    assert pack_entry(unpack_entry(example)) == example


def test_phases_and_modes() -> None:
    assert {phase.name: phase.value for phase in Phase} == {"PREPARED": 1, "ACTIVE": 2, "SETTLED": 3}
    assert {mode.name: mode.value for mode in Mode} == {"SINGLE": 1, "ALL_SUBSCRIBERS": 2, "ALL_PUBLISHERS": 3}
    text = " ".join(TEXT.split())
    assert "Phases: 1 PREPARED, 2 ACTIVE, 3 SETTLED. Modes: 1 SINGLE, 2 ALL_SUBSCRIBERS, 3 ALL_PUBLISHERS." in text


@given(entries())
def test_clients_follow_the_route_that_the_page_says(entry: Entry) -> None:
    assert entry_of(entry) == entry_to_wire(entry)
    assert second.followed_route(entry_of(entry)) == route_of(entry.client_route)


RULES = (CompatibilityRule(b"c1", "s2"), CompatibilityRule(b"plain", "s3", plain=False))


def hash_of(plan: Plan, run_id: str) -> dict[bytes, bytes]:
    """Return the hash that the balancer stores."""
    stored: dict[bytes, bytes] = {}
    for command, _, *fields in stored_plan.write_whole(plan, run_id):
        if command == b"HSET":
            stored |= dict(zip(cast("list[bytes]", fields[::2]), cast("list[bytes]", fields[1::2]), strict=True))
    return stored


@given(
    plans(PLAN_0.with_entries({}, 4).following(Compatibility(4, RULES))),
    channels | st.sampled_from((b"c1", b"c2", b"plain")),
)
def test_the_stored_plan_is_read_and_written_as_documented(plan: Plan, channel: bytes) -> None:
    stored = hash_of(plan, "run")
    read = second.StoredPlan.read(stored)
    assert read.version == plan.version
    assert read.route(channel) == route_of(plan.entry(channel).client_route)
    assert read.fields("run", plan.ring_mark) == stored
    assert stored_plan.parse_whole(read.fields("run", plan.ring_mark), "run") == plan


@given(st.sampled_from((None, b"3")), st.sampled_from((None, b"", b"run", b"other")))
def test_a_plan_is_believed_as_documented(version: bytes | None, run: bytes | None) -> None:
    parsed = stored_plan.parse_entry([version, run, None, None, None], "run")
    assert second.is_believed(version, run, "run") == (parsed is not None)


def test_reading_commands() -> None:
    documented = {row[0]: row[1].strip("`").encode() for row in table("read | command")}
    assert documented == {
        "the header": b" ".join(stored_plan.READ_HEADER),
        "the entry of a channel": b" ".join(stored_plan.read_entry(b"CHANNEL")).replace(slot_of(b"CHANNEL"), b"SLOT"),
        "the version": b" ".join(stored_plan.READ_BELIEVED_VERSION),
    }


def test_fields_of_the_hash() -> None:
    documented = {row[0].strip("`").encode() for row in table("field | value")}
    entry = Entry(Route(1, single("s1")), Phase.SETTLED)
    plan = PLAN_0.with_entries({b"CHANNEL": entry, slot_name(7): entry}, 1)
    written = hash_of(plan.administered(plan.administration), "run")
    assert documented == {name.replace(b"slot:0007", b"slot:NNNN") for name in written}


# Control messages.


def fields_of(message: control.ControlMessage) -> list[Any]:
    """Return the fields of a message as the page lists them."""
    match message:
        case control.RouteNotice(channel, route):
            return [channel, route_of(route)]
        case control.Marker(channel, server, number):
            return [channel, server, number]
        case control.LossNotice(channel, count):
            return [channel, count]
        case control.ObservationGap(server):
            return [server]
        case control.Announcement(client, number, joined, left, leaving):
            return [client, number, [*joined], [*left], [*leaving]]
        case control.PlanChange(delta):
            change = [delta.base, delta.version, [[name, entry_of(entry)] for name, entry in delta.entries.items()]]
            if delta.servers is not None:
                change += [None, [[server.id, server.url] for server in delta.servers]]
            return [change]
        case control.PlanQuery(version, is_doubtful):
            return [version, is_doubtful]
        case control.RulesChanged(version):
            return [version]
        case control.PlanAck(server, incarnation, version):
            return [server, incarnation, version]
        case control.Vacated(server, vacated, incarnation):
            return [server, [[*pair] for pair in vacated], incarnation]
        case control.AdminRequest(request, command, arguments):
            return [request, command, {**arguments}]
        case control.AdminReply(request, result, error):
            return [request, {**result}, error]
        case control.ForwardRequest(copies):
            return [[[*copy] for copy in copies]]


def control_table() -> dict[str, tuple[int, int]]:
    """Return, by message, the code and the number of fields that the page gives."""
    rows = table("code | message | fields | where")
    return {name: (int(code), fields_in(fields)) for code, name, fields, _ in rows}


def fields_in(text: str) -> int:
    """Count the fields of a row: commas outside of all brackets separate them."""
    while (shorter := re.sub(r"\[[^\[\]]*\]|\{[^{}]*\}", "x", text)) != text:
        text = shorter
    return text.count(",") + 1


def test_the_table_of_control_messages() -> None:
    documented = control_table()
    assert documented.pop("report") == (control.REPORT_CODE, 1)
    assert documented.pop("rows") == (records.RECORD_CODE, 5)
    assert set(documented) == {kind.__name__ for kind in get_args(control.ControlMessage)}


@given(control_messages)
def test_control_messages_are_those_of_the_page(message: control.ControlMessage) -> None:
    code, count = control_table()[type(message).__name__]
    made = [code, *fields_of(message)]
    assert len(made) == count + 1
    assert second.pack(made) == control.pack_control(message)
    assert control.unpack_control(second.pack(made)) == message


def test_a_change_of_the_rules() -> None:
    plan = PLAN_0.with_compatibility(RULES)
    rules = [plan.version, [[rule.pattern, rule.server, rule.plain] for rule in RULES]]
    delta = PLAN_0.diff(plan)
    made = second.pack([6, [delta.base, delta.version, [], rules]])
    assert control.pack_control(control.PlanChange(delta)) == made


def test_the_example_messages() -> None:
    notice, marker, announcement = map(control.unpack_control, examples("93 01"))
    assert isinstance(notice, control.RouteNotice)
    assert (notice.channel, route_of(notice.route)) == (b"news", [7, 3, ["s1", "s2"]])
    assert marker == control.Marker(b"news", "s2", 5)
    assert announcement == control.Announcement(0x0123456789ABCDEF, 5, (b"news",), (), ("s1",))
    assert [control.pack_control(each) for each in (notice, marker, announcement)] == examples("93 01")


REPORT = reports.Report(
    server="s1",
    incarnation=1,
    sequence=2,
    interval_s=3.0,
    plan_version=4,
    observation_lag_s=5.0,
    blind_s=6.0,
    interruptions=7,
    observing=False,
    problems=(("kind", "text"),),
    outgoing_bytes_per_s_max=8,
    outgoing_bytes_per_s=9.0,
    outgoing_is_estimate=True,
    incoming_bytes_per_s=10.0,
    cpu_ratio=0.5,
    memory_bytes=11,
    memory_bytes_max=12,
    connections=13,
    connections_max=14,
    output_buffer_bytes_max=15,
    client_buffers_bytes=16,
    channels_subscribed=17,
    columns=reports.ChannelColumns((b"c",), (18,), (19,), (20,), (21,), (22,), (23,), (b"p" * 8,), (b"s" * 8,)),
    rest=reports.ChannelSums(24, 25, 26, 27, 28, 29, 30, 31),
    slots=reports.SlotColumns((32,), (33,), (34,), (35,), (36,), (37,)),
)
"""No value twice, so that each shows where it is."""


def test_the_layout_of_a_report() -> None:
    [layout] = [block.text for block in blocks(PAGE) if block.text.startswith("head ")]
    lines = [part.replace(",", "").split() for part in re.split(r"\n(?=\S)", layout)]
    code, *sent = msgpack.unpackb(reports.pack_report(REPORT))
    assert code == control.REPORT_CODE
    assert [line[0] for line in lines] == ["head", "resources", "columns", "sums", "slots"]
    sources = (REPORT, REPORT, REPORT.columns, REPORT.rest, REPORT.slots)
    for (_, *fields), values, source in zip(lines, sent, sources, strict=True):
        assert second.pack(values) == second.pack([getattr(source, field) for field in fields])


# Order, copies and gaps.

arrivals = st.lists(
    st.tuples(
        st.integers(1, 6) | st.sampled_from((10_011, 10_012, 20_100)),
        st.sampled_from((0, 0, 0, envelope.FIRST, envelope.ROUTE_CHANGED, envelope.HEARTBEAT, envelope.FORWARDED)),
        st.sampled_from((0, 1, 100, 400, 5_000, 65_535)),
        st.sampled_from((0.0, 0.05, 0.3, 0.6, 2.1, 25.0)),
    ),
    max_size=25,
)


@given(arrivals, st.sampled_from((0.0, 0.3, 5.0)))
def test_order_copies_and_gaps(arriving: list[tuple[int, int, int, float]], confirmed_after: float) -> None:
    now = 100.0
    confirmed_at = now + confirmed_after
    ours = sequences.Sequences(second.HOLD_S)
    theirs = second.Stream(confirmed_at)

    def same(outcomes: list[bytes | sequences.Gap], delivered: list[second.Delivered]) -> None:
        gaps = [second.Gap(each.count) if isinstance(each, sequences.Gap) else each for each in outcomes]
        assert gaps == delivered

    for number, flag, quiet_ms, pause in arriving:
        now += pause
        same(ours.expire(7, now), theirs.tick(now))
        payload = b"" if flag & envelope.HEARTBEAT else b"%d" % number
        sent = second.Envelope(flag, 7, number, quiet_ms, 0, payload)
        previous_at = now - quiet_ms / 1000
        same(ours.arrive(7, number, flag, payload, now, previous_at, confirmed_at), theirs.arrive(sent, now))
    same(ours.expire(7, now + second.HOLD_S), theirs.tick(now + second.HOLD_S))


# Patterns.


def test_a_pattern_that_matches_everything() -> None:
    *split, replicas = [pattern.replace(b"\\", b"") for pattern in physical_patterns(b"*")]
    prefix = b"__dynamoth__:"
    made = [part for end in range(len(prefix)) for part in (prefix[:end], prefix[:end] + b"[^%c]*" % prefix[end])]
    assert sorted(split) == sorted(part for part in made if part)
    assert replicas == b"__dynamoth__:r:????????:*"
    assert physical_patterns(b"news.*") == (b"news.*", names.replica_pattern(b"news.*"))


# Numbers.

PUBLISHER, SUBSCRIBER, PATTERNS = PublisherOptions(), SubscriberOptions(), PatternOptions()
DISPATCHER, TRANSITION, BALANCER = DispatcherOptions(), TransitionOptions(), BalancerOptions()

NUMBERS: list[tuple[str, tuple[float, ...]]] = [
    (r"A count above ([\d,]+) means unknown", (control.LOSS_MAX,)),
    (r"Nesting has at most (\d+) levels, and an array at most ([\d,]+)", (wire.DEPTH_MAX, wire.ARRAY_MAX)),
    (r"the process has been up for (\S+) s, then it is a plain Redis", (FRESH_S,)),
    (r"but read the channel's entry every (\S+) s", (PUBLISHER.route_change_window_s,)),
    (
        r"read again every (\S+) s, for (\S+) s at most; then the message counts",
        (READ_AGAIN_S, PUBLISHER.plan_missing_s),
    ),
    (r"or (\S+) s after the first\. For those", (PUBLISHER.straggler_s,)),
    (r"a server that is away for (\S+) s is replaced by the next one", (PUBLISHER.failover_s,)),
    (
        r"cannot be reached\*\* for (\S+) to (\S+) s, or has left a message",
        (PUBLISHER.look_elsewhere_s, 1.5 * PUBLISHER.look_elsewhere_s),
    ),
    (r"is not SETTLED, wait (\S+) s first", (SUBSCRIBER.join_moving_s,)),
    (r"or older than what you know, read again every (\S+) s\.", (SUBSCRIBER.verify_retry_s,)),
    (r"A route that servers contradict for (\S+) s", (SUBSCRIBER.distrust_s,)),
    (r"wait for up to (\S+) s, each subscriber", (SUBSCRIBER.move_spread_s,)),
    (
        r"longer than (\S+) s, verify and announce again, then at doubling distances of up to (\S+) s",
        (SUBSCRIBER.look_again_s, SUBSCRIBER.look_again_s_max),
    ),
    (r"If no Marker has come after (\S+) s", (SUBSCRIBER.marker_s,)),
    (r"What has been held for (\S+) s is released", (SUBSCRIBER.hold_s_max,)),
    (r"if at most (\d+) are held, and the message before", (sequences.FOLLOWERS_MAX,)),
    (r"When at most ([\d,]+) messages are held", (sequences.HELD_MAX,)),
    (r"and less than (\S+) s ago", (envelope.QUIET_MS_MAX / 1000,)),
    (r"A number of more than ([\d,]+) above", (sequences.HELD_MAX,)),
    (r"more than (\d+) s later and not FORWARDED", (sequences.LATE_S,)),
    (r"Read the headers again every (\S+) s: a server", (PATTERNS.header_interval_s,)),
    (r"carries no channel for (\d+) s", (JOIN_S,)),
    (r"first message after the activation, after (\S+) s at the latest", (TRANSITION.trickle_delay_s,)),
    (r"and every (\S+) s\. - \*\*Vacated", (TRANSITION.notice_interval_s,)),
    (
        r"From (\S+) s after the activation, it asks NUMSUB .* every (\S+) s, and reports",
        (TRANSITION.settle_after_s, TRANSITION.poll_interval_s),
    ),
    (r"again after (\S+) s\. Listeners", (DISPATCHER.renotify_s,)),
    (r"NX PX (\d+)`", (BALANCER.lease_s * 1000,)),
    (r"Numbers above 2\^(\d+) are dropped", (math.log2(sequences.NUMBER_MAX),)),
]


@pytest.mark.parametrize(("pattern", "values"), NUMBERS, ids=[str(values) for _, values in NUMBERS])
def test_numbers(pattern: str, values: tuple[float, ...]) -> None:
    found = re.search(pattern, " ".join(TEXT.split()))
    assert found is not None, f"the page does not say: {pattern}"
    assert [float(group.replace(",", "")) for group in found.groups()] == pytest.approx(list(values))
