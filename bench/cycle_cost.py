"""What one cycle of the balancer costs at a large cluster: reports in, a decision, the change of the plan out.

Run with ``python -m bench.cycle_cost``. No server is needed: everything but the network is measured, in one process on
one core, in CPU time. Prints a line per figure, then one line of JSON; ends with 1 when a target is missed.

Each server has the same number of channels, all of them active and named in its reports, as agents send them: 1,000 at
most. Half of the channels have an entry of their own in the plan, the others follow their slots. One server in four is
overloaded, and the averages are full. A cycle is a second of the balancer:

1. ingest: a report of each server is unpacked and taken into the model;
2. decide: the goals are asked about the cluster;
3. diff: the plan's next version, the command that stores it, the message for the agents, and what each server is sent.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from dynamoth.machine.events import CommandPart, Send
from dynamoth.plan.plan import Entry, Phase, Plan, Route, Server, single
from dynamoth.protocol.reports import ChannelColumns, Report, pack_report
from dynamoth.protocol.stored_plan import ENTRIES_PER_COMMAND, write_whole
from dynamoth_balancer.decide.decider import Decider
from dynamoth_balancer.decide.drain import Drain, DrainSlots
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.pins import Pin
from dynamoth_balancer.decide.relieve import Relieve, RelieveSlots
from dynamoth_balancer.decide.replicate import Replicate
from dynamoth_balancer.decide.spread import Spread
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.book import PlanBook
from dynamoth_balancer.install.hearing import Hearing
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.options import BalancerOptions

CYCLE_S_MAX = 2.0
MEMORY_BYTES_MAX = 2_000_000_000

CAPACITY_BYTES_PER_S = 125_000_000
OVERLOADED_RATIO, OTHER_RATIO = 0.95, 0.35
OVERLOADED_SHARE = 4
"""Every fourth server."""
VERSION = 7
INTERVAL_S = 1.0


@dataclass(frozen=True)
class Result:
    channels: int
    servers: int
    named: int
    moves: int
    ingest_s: float
    decide_s: float
    diff_s: float
    cycle_s: float
    #: The most memory that this process has ever used.
    memory_bytes: int

    def missed(self) -> list[str]:
        missed: list[str] = []
        if self.cycle_s > CYCLE_S_MAX:
            missed.append(f"a cycle takes more than {CYCLE_S_MAX:g} s")
        if self.memory_bytes > MEMORY_BYTES_MAX:
            missed.append(f"it needs more than {MEMORY_BYTES_MAX / 1e9:g} GB")
        return missed


class Bench:
    """A balancer that leads a large cluster, without its network."""

    def __init__(self, channels: int, servers: int, named_ratio: float) -> None:
        self.options = BalancerOptions(wait_s=INTERVAL_S)
        self.named = round(channels * named_ratio)
        by_id = {f"s{number}": Server(f"s{number}", f"redis://s{number}:6379") for number in range(servers)}
        self.plan = _plan(by_id, self.named)
        self.model = ClusterModel(by_id, self.options.averaging_s)
        self.agents = Agents(by_id, self.options.agent_stale_s, self.model.blind)
        self.hearing = Hearing(self.agents, self.model, Counter())
        urgent_goals, slot_goals = (Pin(), Replicate(), Relieve()), (RelieveSlots(), DrainSlots(), Spread())
        self.decider = Decider(self.model, urgent_goals, (Drain(),), slot_goals, self.options)
        self.reports = [
            pack_report(_report(server, index, names))
            for index, (server, names) in enumerate(_channels_at(self.plan, channels).items())
        ]
        self.channels = channels
        self.now = 0.0
        self.installer = self._installer()
        rounds = round(max(self.options.averaging_s, self.options.join_s) / INTERVAL_S)
        for _ in range(rounds + 1):
            self.ingest()
        self.decider.wait(self.now)
        self.decider.look(self.installer, self.now)  # one that makes no plan, as most: the first of all has less to do

    def _installer(self) -> Installer:
        """Return an installer whose copies are all written."""
        servers = list(self.plan.servers.values())
        installer = Installer(PlanBook(self.plan, {}), servers, self.agents, self.options, 1, self.now)
        audited = MappingProxyType(dict(islice(self.plan.entries.items(), ENTRIES_PER_COMMAND)))
        commands = write_whole(replace(self.plan, entries=audited), "run")[1:-1]
        stored = {
            name: value for _, _, *fields in commands for name, value in zip(fields[::2], fields[1::2], strict=True)
        }
        answers: dict[CommandPart, Any] = {b"HLEN": len(stored) + len(self.plan.entries) - len(audited)}
        for server in servers:
            self.agents.hear(server.id, 1, self.now)
            actions = installer.link_up(server.id, "run", self.now)
            while actions:
                [send] = [action for action in actions if isinstance(action, Send)]
                reply = answers.get(send.args[0], [stored.get(name) for name in send.args[2:]])
                actions = installer.on_reply(server.id, send.tag, reply, self.now)
        return installer

    def ingest(self) -> None:
        """Take a report of each server in, as one second brings them."""
        self.now += INTERVAL_S
        for index, report in enumerate(self.reports):
            self.hearing.on_message(f"s{index}", report, self.installer, self.now)

    def measure(self) -> Result:
        """Measure one cycle."""
        started = time.process_time()
        self.ingest()
        ingested = time.process_time()
        made = self.decider.look(self.installer, self.now)
        decided = time.process_time()
        assert made is not None and made.decision.moves, "a quarter of the servers are overloaded"
        assignments = {move.channel: move.after for move in made.decision.moves}
        actions = self.installer.begin(assignments, "measured", self.now)
        self.model.on_moves({move.channel: (move.before, move.after) for move in made.decision.moves}, self.now)
        ended = time.process_time()
        assert sum(isinstance(action, Send) for action in actions) == len(self.plan.servers), "each server gets it"
        return Result(
            self.channels,
            len(self.plan.servers),
            self.named,
            len(assignments),
            ingested - started,
            decided - ingested,
            ended - decided,
            ended - started,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def _plan(servers: dict[str, Server], named: int) -> Plan:
    """Return a plan with an entry for so many channels, evenly spread."""
    settled = [Entry(Route(VERSION, single(server)), Phase.SETTLED) for server in servers]
    entries = {_name(number): settled[number % len(settled)] for number in range(named)}
    return Plan(VERSION, servers, tuple(servers), MappingProxyType(entries))


def _name(number: int) -> bytes:
    return b"game/tile/%07d" % number


def _channels_at(plan: Plan, channels: int) -> dict[str, list[bytes]]:
    """Return the channels of each server."""
    at: dict[str, list[bytes]] = {server: [] for server in plan.servers}
    for number in range(channels):
        name = _name(number)
        at[plan.entry(name).route.assignment.servers[0]].append(name)
    return at


def _report(server: str, index: int, channels: list[bytes]) -> Report:
    """Return what the agent of a server measures: few channels are busy, many are not (Zipf)."""
    ratio = OVERLOADED_RATIO if index % OVERLOADED_SHARE == 0 else OTHER_RATIO
    shares = [1 / (rank + 5) for rank in range(len(channels))]
    bytes_per_s = ratio * CAPACITY_BYTES_PER_S / sum(shares)
    random.Random(index).shuffle(channels)
    out = tuple(round(bytes_per_s * share) for share in shares)
    ones, sent, nobody = (1,) * len(channels), tuple(range(len(channels))), (b"",) * len(channels)
    return Report(
        server=server,
        incarnation=1,
        sequence=1,
        interval_s=INTERVAL_S,
        plan_version=VERSION,
        outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S,
        outgoing_bytes_per_s=float(sum(out)),
        cpu_ratio=ratio / 2,
        columns=ChannelColumns(tuple(channels), ones, ones, sent, sent, out, out, nobody, nobody),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=1_000_000)
    parser.add_argument("--servers", type=int, default=1_000)
    parser.add_argument("--named-ratio", type=float, default=0.5, help="the part of the channels with an entry")
    arguments = parser.parse_args()
    bench = Bench(arguments.channels, arguments.servers, arguments.named_ratio)
    gc.collect()
    result = bench.measure()
    lines = [
        f"{result.channels} channels on {result.servers} servers, {result.named} in the plan, {result.moves} moved",
        f"  ingest: a report of each server  {result.ingest_s:8.3f} s of CPU",
        f"  decide                           {result.decide_s:8.3f} s",
        f"  diff: what each server is sent   {result.diff_s:8.3f} s",
        f"  a cycle                          {result.cycle_s:8.3f} s",
        f"  memory at most                   {result.memory_bytes / 1e6:8.0f} MB",
        json.dumps({"benchmark": "cycle_cost", **asdict(result)}),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    missed = result.missed()
    sys.stderr.write("".join(f"missed: {each}\n" for each in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
