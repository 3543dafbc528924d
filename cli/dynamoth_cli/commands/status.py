"""``dynamoth status``: servers, agents, load and balancer, as the servers and the balancer tell them."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from dynamoth.errors import ClusterUnavailable, MalformedMessage, RequestRefused
from dynamoth.machine.events import ErrorReply
from dynamoth.names import AGENT_CHANNEL, OPERATOR_CHANNEL, RECORD_CHANNEL, RECORDER_FAILING_CHANNEL
from dynamoth.protocol.stored_plan import READ_HEADER, parse_header
from dynamoth_balancer.admin.health import Severity, no_agent, several_agents
from dynamoth_cli.admin import ANSWER_TIMEOUT_S, ask_all, ask_balancer, read_header
from dynamoth_cli.cluster_access import Access, access_of, add_access
from dynamoth_cli.commands import compatibility
from dynamoth_cli.decisions import describe_decision, to_json
from dynamoth_cli.numbers import channel_name, counted, duration
from dynamoth_link.errors import LinkError
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ClusterAddress, ServerAddress, parse_server_url

REPLICATED_SHOWN_MAX = 20
DECISIONS_SHOWN_MAX = 3
MOVES_SHOWN_MAX = 5
"""Bounds of what is shown; the balancer tells more with ``--json``, and its log tells everything."""

RECORDER_FAILING = (
    "a recorder cannot write its recording, so rows will be lost: make room on its disk; its log and /readyz say more"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_access(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the state of the cluster. The exit code is 1 when it has a problem that is an error, not a warning."""
    status = asyncio.run(read_status(access_of(arguments)))
    if arguments.json:
        sys.stdout.write(to_json(status))
    else:
        show(status, Console())
    return 1 if any(problem["severity"] == Severity.ERROR.value for problem in status["problems"]) else 0


async def read_status(access: Access) -> dict[str, Any]:
    """Return the state of the cluster.

    It has ``version``, ``servers``, ``balancer`` (what the one that leads says, or one that waits; None for no answer),
    ``balancers`` (how many are connected, those that wait and those that hang included), and ``problems``.

    A problem has ``severity``, ``kind``, ``subject``, ``reason`` and ``age_s``; the latter is None for those that this
    process has found by asking the servers itself.

    Raises:
        ClusterUnavailable: no server answers, or none stores a plan.

    """
    cluster, link = access.cluster, access.link
    plan = await read_header(cluster, link)
    addresses = {id_: cluster.merge(parse_server_url(server.url)) for id_, server in plan.servers.items()}
    problems: list[Mapping[str, Any]] = []
    servers, balancer = await asyncio.gather(_servers(addresses, link, problems), _balancer(cluster, link, problems))
    for id_, server in servers.items():
        server["load"] = balancer["servers"].get(id_, {}) if balancer else {}
    known: list[Mapping[str, Any]] = balancer.get("problems", []) if balancer else []
    return {
        "version": plan.version,
        "servers": servers,
        "balancer": balancer,
        "balancers": max((server.pop("balancers") or 0 for server in servers.values()), default=0),
        "problems": merged(known, problems),
    }


async def _balancer(
    cluster: ClusterAddress, link: LinkOptions, problems: list[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the status that the balancer gives; None, and a problem, when it does not answer."""
    try:
        return await ask_balancer(cluster, "status", timeout_s=ANSWER_TIMEOUT_S, link=link)
    except (ClusterUnavailable, RequestRefused) as error:
        problems.append(_problem("no_balancer", "balancer", str(error)))
        return None


def merged(reported: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the balancer's problems, and those that only this process has found."""
    known = {(problem["kind"], problem["subject"]) for problem in reported}
    # Redis disconnects it again and again, and it reports that over another connection.
    known |= {("agent_silent", problem["subject"]) for problem in reported if problem["kind"] == "agent_blind"}
    return [*reported, *(problem for problem in found if (problem["kind"], problem["subject"]) not in known)]


def _problem(kind: str, subject: str, reason: str, severity: Severity = Severity.ERROR) -> dict[str, Any]:
    return {"severity": severity.value, "kind": kind, "subject": subject, "reason": reason, "age_s": None}


async def _servers(
    addresses: Mapping[str, ServerAddress], link: LinkOptions, problems: list[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Ask the servers themselves; add what is wrong to ``problems``."""
    channels = AGENT_CHANNEL, RECORDER_FAILING_CHANNEL, RECORD_CHANNEL, OPERATOR_CHANNEL
    commands = (b"PUBSUB", b"NUMSUB", *channels), READ_HEADER
    answers = await ask_all([*addresses.values()], *commands, link=link)
    return {
        id_: _server(id_, address, answer, problems)
        for (id_, address), answer in zip(addresses.items(), answers, strict=True)
    }


def _server(
    id_: str, address: ServerAddress, answer: list[Any] | LinkError, problems: list[Mapping[str, Any]]
) -> dict[str, Any]:
    found: dict[str, Any] = {"url": address.redacted()}
    found |= dict.fromkeys(("agents", "recorders", "balancers", "stored_version"))
    if isinstance(answer, LinkError):
        problems.append(_problem("server_unreachable", id_, str(answer)))
        return found
    listening, stored = answer
    if isinstance(listening, ErrorReply) or isinstance(stored, ErrorReply):
        refusal = str(listening if isinstance(listening, ErrorReply) else stored)
        problems.append(_problem("server_refuses", id_, refusal))
        return found
    header, damage = None, ""
    try:
        header = parse_header(stored, None)
    except MalformedMessage as error:
        damage = f"its stored plan cannot be used: {error}"
    _, agents, _, failing, _, recorders, _, balancers = listening
    found["agents"], found["recorders"], found["balancers"] = agents, recorders, balancers
    if failing and not any(problem["kind"] == "recorder_failing" for problem in problems):
        problems.append(_problem("recorder_failing", "recorder", RECORDER_FAILING))
    found["stored_version"] = None if header is None else header.version
    if agents == 0:
        problems.append(_problem("agent_silent", id_, no_agent(id_)))
    elif agents != 1:
        problems.append(_problem("agents_in_conflict", id_, several_agents(agents), Severity.WARNING))
    if damage:
        problems.append(_problem("plan_unreadable", id_, damage))
    elif header is None:
        text = "it stores no plan: the balancer writes it when it gets there"
        problems.append(_problem("plan_not_stored", id_, text))
    return found


def describe_problem(problem: Mapping[str, Any]) -> str:
    """Return a problem in words."""
    age_s = problem["age_s"]
    since = "" if age_s is None else f" (for {age_s:.0f} s)"
    return f"{problem['subject']}: {problem['reason']}{since}"


def show(status: Mapping[str, Any], console: Console) -> None:
    """Print a status for people."""
    lines = table_of(status["servers"], console.width)
    if (balancer := status["balancer"]) is not None:
        first, *others = describe_balancer(status["version"], balancer)
        lines += [first, describe_leader(balancer, status["balancers"]), *others]
    lines += describe_recorders(status["servers"])
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for problem in status["problems"]:
        color = "red" if problem["severity"] == Severity.ERROR.value else "yellow"
        console.print(f"[bold {color}]![/] {escape(describe_problem(problem))}", highlight=False, soft_wrap=True)


HEADINGS = ("server", "agents", "plan", "load", "out MB/s", "messages/s", "channels", "CPU", "tightest")


def table_of(servers: Mapping[str, Mapping[str, Any]], width: int) -> list[str]:
    """Return the lines of the table of servers. URLs that do not fit into ``width`` get lines of their own."""
    rows = [HEADINGS, *(_figures(id_, server) for id_, server in servers.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    urls = ["url", *(server["url"] for server in servers.values())]
    apart = sum(widths) + 2 * len(widths) + max(map(len, urls)) > width
    lines: list[str] = []
    for row, url in zip(rows, urls, strict=True):
        name, *figures = (
            text.rjust(size) if column else text.ljust(size)
            for column, (text, size) in enumerate(zip(row, widths, strict=True))
        )
        line = "  ".join([name, *figures])
        if not apart:
            lines.append(f"{line}  {url}")
        elif row is HEADINGS:
            lines.append(line)
        else:
            lines += [line, f"    {url}"]
    return lines


def _figures(id_: str, server: Mapping[str, Any]) -> tuple[str, ...]:
    load = server["load"]
    return (
        id_,
        _shown(server["agents"]),
        _shown(server["stored_version"]),
        _shown(load.get("load_ratio"), "{:.2f}"),
        _shown(load.get("outgoing_bytes_per_s"), "{:.2f}", 1e-6),
        _shown(load.get("messages_per_s"), "{:.0f}"),
        _shown(load.get("channels")),
        _shown(load.get("cpu_ratio"), "{:.2f}"),
        _tightest(load),
    )


def _tightest(load: Mapping[str, Any]) -> str:
    """Return the resource of which a server uses most, and how much."""
    name = load.get("tightest_resource")
    return "-" if name is None else f"{name} {load['resource_ratios'][name]:.2f}"


def describe_leader(balancer: Mapping[str, Any], balancers: int) -> str:
    """Return which balancer leads, since when, and whether another one can replace it.

    Args:
        balancer: what the balancer says that has answered; an old version does not say which process it is.
        balancers: how many are connected.

    """
    if balancer["stage"] != "leading":
        return f"no balancer that leads has answered; {counted(balancers, 'balancer')} connected"
    process, leading_s = balancer.get("process"), balancer.get("leading_s")
    since = "" if leading_s is None else f" for {duration(leading_s)}"
    standbys = (
        f"{counted(balancers - 1, 'standby balancer')} connected"
        if balancers > 1
        else "no standby: start a second 'dynamoth balancer', which takes over when this one dies"
    )
    return f"led by {process or 'a balancer'} (incarnation {balancer['incarnation']}){since}; {standbys}"


def describe_balancer(version: int, balancer: Mapping[str, Any]) -> list[str]:
    """Return the balancer's status in words: its state, the replicated channels, its latest decisions."""
    paused = ", paused" if balancer["paused"] else ""
    lines = [
        f"plan version {version}; balancer: {balancer['stage']}{paused},"
        f" {counted(balancer['moves_settled'], 'move')} settled,"
        f" {counted(balancer['in_transition'], 'channel')} in transition"
    ]
    servers: Mapping[str, Mapping[str, Any]] = balancer["servers"]
    lines += [
        _draining(id_, server["channels_left"], server.get("channels_named"), server.get("slots_left") or 0)
        for id_, server in servers.items()
        if server.get("draining")
    ]
    if (fleet := balancer.get("fleet")) is not None:
        lines.append(_fleet(fleet))
    if rules := balancer.get("compatibility"):
        lines += compatibility.describe(rules)
    replicated: list[Mapping[str, Any]] = balancer.get("replicated_channels", [])
    for channel in replicated[:REPLICATED_SHOWN_MAX]:
        transition = "" if channel["settled"] else f", {channel['phase']}"
        where = ", ".join(channel["servers"])
        lines.append(f"replicated: {channel_name(channel['channel'])} at {where}, {channel['mode']}{transition}")
    if (more := balancer.get("replicated", 0) - REPLICATED_SHOWN_MAX) > 0:
        lines.append(f"replicated: {more} more, see 'dynamoth plan show'")
    pinned: list[Mapping[str, Any]] = balancer.get("pinned_channels", [])
    for channel in pinned[:REPLICATED_SHOWN_MAX]:
        lines.append(f"pinned: {channel_name(channel['channel'])} to {', '.join(channel['servers'])}")
    if (more := balancer.get("pinned", 0) - REPLICATED_SHOWN_MAX) > 0:
        lines.append(f"pinned: {more} more, see 'dynamoth plan show'")
    for decision in balancer["decisions"][-DECISIONS_SHOWN_MAX:]:
        lines += describe_decision(decision, MOVES_SHOWN_MAX)
    return lines


def describe_recorders(servers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return how many recorders listen, and the servers at which some do not; nothing where nobody records."""
    counts = {id_: server["recorders"] for id_, server in servers.items() if server["recorders"] is not None}
    most = max(counts.values(), default=0)
    fewer = "".join(f", only {count} at {id_}" for id_, count in counts.items() if count < most)
    return [f"recorded by {counted(most, 'recorder')}{fewer}"] if most else []


def _fleet(fleet: Mapping[str, Any]) -> str:
    """Return which servers come and go."""
    each = ", ".join(f"{id_} is {server['life']}" for id_, server in fleet["servers"].items())
    bounds = f"{fleet['servers_min']} to {fleet['servers_max']} servers, {fleet['server_seconds']:.0f} server-seconds"
    return f"fleet: {bounds}; {each or 'none of the provisioner'}"


def _draining(server: str, channels_left: int | None, channels_named: int | None, slots_left: int) -> str:
    numbers = {"channel": channels_named if channels_left is None else channels_left, "slot": slots_left}
    left = " and ".join(counted(number, what) for what, number in numbers.items() if number)
    if channels_left is None:
        named = f"the plan has {left or 'no channel'} there"
        return f"draining: {server}; {named}; its agent does not report what else is left"
    verb = "is" if channels_left + slots_left == 1 else "are"
    return f"draining: {server}; {left or 'nothing'} {verb if left else 'is'} left there"


def _shown(value: Any, form: str = "{}", factor: float = 1) -> str:
    return "-" if value is None else form.format(value if factor == 1 else value * factor)
