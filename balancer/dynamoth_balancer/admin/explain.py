"""Explains to administrators why a channel is where it is and is not moved, and what a server carries and does.

Nothing here changes anything: what the balancer would do is a preview. Texts are for people; whatever programs need is
data beside them.

A result has ``kind`` ("channel" or "server"), ``version`` of the plan, ``obstacles`` (why the balancer makes no plan of
its own now), and for a channel or slot:

``channel``, ``mode``, ``servers``, ``epoch``, ``phase``, ``previous``, ``settled``
    As in the plan.
``slot``, ``home``
    The number of its slot, and the server that ring and rules give.
``placed_by``, ``why``
    "entry", "slot", "rule" or "ring", and the same in words.
``pinned_to``
    The servers that an administrator has pinned it to; None where it is not pinned.
``since_s``
    How long ago it was moved there; None where this balancer has not seen it.
``waiting_for``
    What its transition waits for.
``load``
    ``reported`` (whether agents name it in their reports), and by server ``outgoing_bytes_per_s`` and ``load_ratio``;
    over all servers ``publications_per_s``, ``publishers`` and ``subscribers``, None while it is in transition, and
    afterwards until the averages rest on later reports.
``moves``
    Its latest moves: ``age_s``, ``from``, ``to``, ``mode_before``, ``mode_after``, ``goal``, ``reason``.
``decisions``
    The latest decisions that moved it or its slot, whole: as :func:`~dynamoth_balancer.admin.status.describe_decision`
    has them, with all their moves, its own first, and the load ratios of the servers before, predicted and measured.
``next_move``
    The move that the balancer would make now; None for none.
``stays``
    Why the balancer does not move it now, in words; empty where it would.

For a server:

``server``, ``status``
    Its id, and its part of the status, with what it uses of each resource.
``why_not``, ``why_not_to``
    Why it takes part in no change, and why it gets no channels; empty where it does.
``slots``, ``busiest``
    How many slots it has, and its busiest channels with their load.
``findings``, ``next_moves``
    What goals could not reach there, and the moves that touch it and that the balancer would make now.
``decisions``
    The latest that touched it, whole, as those of a channel; and its own load ratios: ``before``, ``predicted``,
    ``measured``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth.names import in_quotes, is_user_channel, logical_channel
from dynamoth.plan.plan import Assignment, Entry, Mode, Phase
from dynamoth.plan.slots import is_slot, slot_number, slot_of
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_balancer.admin.status import describe_decision, describe_entry, describe_move
from dynamoth_balancer.decide.cluster import ChannelFigures, Cluster, Decision, Move, busiest_first
from dynamoth_balancer.decide.decider import Decider
from dynamoth_balancer.decide.history import PastMove
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.pins import pinned_names
from dynamoth_balancer.decide.worth import Worth, judge
from dynamoth_balancer.install.installer import Installer

BUSIEST_SHOWN_MAX = 20
MOVES_SHOWN_MAX = 20
TARGETS_NAMED_MAX = 5
DECISIONS_SHOWN_MAX = 10
MOVES_PER_DECISION_MAX = 100
"""Bounds of what one reply holds: some 500 KB."""

NOT_MEASURED_YET = "its agent has not reported often enough yet"
"""Why a server takes part in no decision that otherwise could."""

_GAINS = {
    Worth.FILLS_TARGET: "{target} would have load ratio {after:.2f}",
    Worth.GAINS_LITTLE: "the larger load ratio of {source} and {target} would hardly get smaller",
}


class Explainer:
    """Explains channels and servers.

    Args:
        decider: knows what rests, and what would be done.
        model: knows the loads.
        server_status: returns the status of a server at a time.

    """

    def __init__(
        self, decider: Decider, model: ClusterModel, server_status: Callable[[str, float], dict[str, Any]]
    ) -> None:
        self._decider = decider
        self._model = model
        self._server_status = server_status

    def explain(self, installer: Installer, arguments: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Explain what the arguments name. Raises RequestRefused where they name nothing that can be explained."""
        name, kind = arguments.get("name"), arguments.get("kind")
        if not isinstance(name, bytes) or not name or kind not in (None, "channel", "server"):
            raise RequestRefused('explain takes the arguments name (bytes) and kind ("channel" or "server", optional)')
        server = name.decode(errors="backslashreplace")
        common = {"version": installer.plan.version, "obstacles": list(self._decider.obstacles(installer, now))}
        if kind == "server" and server not in installer.plan.servers:
            raise RequestRefused(f"server {server!r:.80} is not known; known are {', '.join(installer.plan.servers)}")
        if kind != "channel" and server in installer.plan.servers:
            return {**common, **self._server(installer, server, now)}
        if not is_slot(name) and not (is_user_channel(name) and logical_channel(name) == name):
            raise RequestRefused(f"channel {in_quotes(name)} is not an application's: it is at every server")
        return {**common, **self._channel(installer, name, now)}

    def _decisions(self, concerns: Callable[[Move], bool], now: float) -> list[dict[str, Any]]:
        """Return the latest decisions with a move that ``concerns`` whoever asks."""
        made = [made for made in self._decider.history.decisions if any(map(concerns, made.decision.moves))]
        return [describe_decision(each, now, MOVES_PER_DECISION_MAX, concerns) for each in made[-DECISIONS_SHOWN_MAX:]]

    # Channels.

    def _channel(self, installer: Installer, channel: bytes, now: float) -> dict[str, Any]:
        plan, entry = installer.plan, installer.plan.entry(channel)
        placed_by, why = _place(installer, channel)
        moves = [(channel, move) for move in self._decider.history.moves_of(channel)]
        slot = channel if is_slot(channel) else slot_of(channel)
        if placed_by == "slot":
            moves += [(slot, move) for move in self._decider.history.moves_of(slot)]
        transition = installer.transitions.get(slot if placed_by == "slot" else channel)
        preview, _ = self._decider.preview(installer, now)
        move = next((move for move in preview.moves if move.channel in (channel, plan.slot_above(channel))), None)
        [home] = plan.home_route(channel).assignment.servers
        return {
            "kind": "channel",
            **describe_entry(channel, entry),
            "slot": slot_number(slot),
            "home": home,
            "placed_by": placed_by,
            "why": why,
            "pinned_to": None if (pin := plan.administration.pins.get(channel)) is None else list(pin.servers),
            "since_s": now - moves[-1][1].at if moves and moves[-1][1].after == entry.route.assignment else None,
            "waiting_for": [] if transition is None else list(installer.waiting_for(transition, now)),
            "load": self._load(installer, channel, entry, now),
            "moves": [_describe_past_move(name, past, now) for name, past in moves],
            "decisions": self._decisions(lambda move: move.channel in (channel, slot), now),
            "next_move": None if move is None else describe_move(move),
            "stays": [] if move else list(self._why_it_stays(installer, channel, entry, preview, now)),
        }

    def _load(self, installer: Installer, channel: bytes, entry: Entry, now: float) -> dict[str, Any]:
        servers = [*dict.fromkeys(server for route in entry.live_routes for server in route.assignment.servers)]
        rates = {server: self._decider.rate(channel, server, installer) for server in servers}
        loads = {server: self._model.load(server, now) for server in servers}
        reported = any(self._model.names(server, channel) for server in servers)
        is_known = reported and entry.phase is Phase.SETTLED
        figures = self._model.figures({channel: entry.route.assignment} if is_known else {})
        return {
            "reported": reported,
            "outgoing_bytes_per_s": {server: rate.outgoing_bytes_per_s for server, rate in rates.items()},
            "load_ratio": {
                server: None if load is None else load.share(rates[server].load) for server, load in loads.items()
            },
            **_clients(next(iter(figures), None)),
        }

    def _why_it_stays(
        self, installer: Installer, channel: bytes, entry: Entry, preview: Decision, now: float
    ) -> Iterator[str]:
        plan, assignment = installer.plan, entry.route.assignment
        slot = plan.slot_above(channel)
        if entry.phase is not Phase.SETTLED:
            what = "it" if slot is None else "its slot"
            yield f"{what} is in transition, and settles before it can move again"
            return
        if plan.compatibility.is_plain(channel):
            yield "plain Redis clients use it, so it stays at the server of its compatibility rule"
            return
        if channel in plan.administration.pins:
            yield "an administrator has pinned it: 'dynamoth unpin' lets the balancer move it"
        elif channel in pinned_names(plan):
            yield "a channel of this slot is pinned, and follows the slot: 'dynamoth unpin' lets the balancer move it"
        if self._decider.is_held(channel, assignment):
            yield "an administrator has replicated it so, or put it back at one server"
        if (rest_s := self._decider.rests_s(channel, now)) > 0:
            yield f"it has moved lately and rests for {rest_s:.0f} s"
        cluster = self._decider.cluster(installer, now)
        for server in assignment.servers:
            if server not in cluster.servers:
                yield f"{server} takes part in no change: {why_absent(installer, server, now)}"
        yield from (
            f"{finding.goal}: {finding.reason}"
            for finding in preview.findings
            if finding.channel == channel or finding.server in assignment.servers
        )
        if channel not in cluster.pins and all(server in cluster.servers for server in assignment.servers):
            yield from self._why_no_goal_moves_it(cluster, channel, assignment, installer, preview)

    def _why_no_goal_moves_it(
        self, cluster: Cluster, channel: bytes, assignment: Assignment, installer: Installer, preview: Decision
    ) -> Iterator[str]:
        options = cluster.options
        if assignment.mode is not Mode.SINGLE:
            yield "it is replicated: its load asks neither for more servers nor for fewer"
            return
        source = cluster.servers[assignment.servers[0]]
        load = self._decider.rate(channel, source.id, installer)
        if source.load_ratio <= options.load_ratio_high:
            yield (
                f"nothing asks for a move: {source.id} has load ratio {source.load_ratio:.2f}, and servers are relieved"
                f" above {options.load_ratio_high:.2f}"
            )
            return
        if source.share(load.load) < options.channel_ratio_min:
            yield f"it makes too little of the load of {source.id}: less than {options.channel_ratio_min:.1%}"
            return
        moves = [cluster.move(load, source, target, "") for target in cluster.targets if target is not source]
        verdicts = [(move, judge(move, options)) for move in moves]
        better = [move.target for move, worth in verdicts if worth is Worth.WORTH_IT]
        if better:
            others_go = any(move.source == source.id for move in preview.moves)
            why = "other channels go first" if others_go else f"that would not relieve {source.id} by enough"
            yield f"{', '.join(better[:TARGETS_NAMED_MAX])} could take it, but {why}"
        for move, worth in [] if better else verdicts[:TARGETS_NAMED_MAX]:
            yield _GAINS[worth].format(source=source.id, target=move.target, after=move.ratios[move.target].after)

    # Servers.

    def _server(self, installer: Installer, server: str, now: float) -> dict[str, Any]:
        preview, _ = self._decider.preview(installer, now)
        status = self._server_status(server, now)
        full = f"it uses {status['full']}" if status["full"] else ""
        return {
            "kind": "server",
            "server": server,
            "status": status,
            "why_not": installer.why_not(server, now) or "",
            "why_not_to": installer.why_not_to(server, now) or full,
            "slots": len(installer.index.slots_at[server]),
            "busiest": self._busiest(installer, server, now),
            "findings": [asdict(finding) for finding in preview.findings if finding.server == server],
            "next_moves": [describe_move(move) for move in preview.moves if server in move.ratios][:MOVES_SHOWN_MAX],
            "decisions": [
                {**decision, **decision["load_ratios"][server]}
                for decision in self._decisions(lambda move: server in move.ratios, now)
            ],
        }

    def _busiest(self, installer: Installer, server: str, now: float) -> list[dict[str, Any]]:
        load = self._model.load(server, now)
        channels = self._model.channels(server)
        busiest = (channels if load is None else busiest_first(channels, load))[:BUSIEST_SHOWN_MAX]
        entries = {rate.channel: installer.plan.entry(rate.channel) for rate in busiest}
        settled = {name: each.route.assignment for name, each in entries.items() if each.phase is Phase.SETTLED}
        figures = {each.channel: each for each in self._model.figures(settled)}
        return [
            {
                "channel": rate.channel,
                "mode": mode_name(entries[rate.channel].route.assignment.mode),
                "servers": list(entries[rate.channel].route.assignment.servers),
                "settled": rate.channel in settled,
                "outgoing_bytes_per_s": rate.outgoing_bytes_per_s,
                "load_ratio": None if load is None else load.share(rate.load),
                **_clients(figures.get(rate.channel)),
            }
            for rate in busiest
        ]


def _clients(figures: ChannelFigures | None) -> dict[str, float | None]:
    """Return who publishes and subscribes, None where that is not known."""
    return {
        "publications_per_s": None if figures is None else figures.publications_per_s,
        "publishers": None if figures is None else figures.publishers,
        "subscribers": None if figures is None else figures.subscribers,
    }


def why_absent(installer: Installer, server: str, now: float) -> str:
    """Return why a server of the plan takes part in no decision."""
    return installer.why_not(server, now) or installer.why_not_to(server, now) or NOT_MEASURED_YET


def _place(installer: Installer, channel: bytes) -> tuple[str, str]:
    """Return what puts a channel where it is, and the same in words."""
    plan = installer.plan
    if channel in plan.entries:
        return "entry", "the plan names it"
    if (rule := plan.compatibility.rule_of(channel)) is not None:
        return "rule", f"the compatibility rule {in_quotes(rule.pattern)} puts it at {rule.server}"
    slot = plan.slot_above(channel)
    if slot is not None and slot in plan.entries:
        return "slot", f"it follows its slot {slot_number(slot)}, which has been moved"
    return "ring", "it has never been moved: it is where the ring puts it"


def _describe_past_move(name: bytes, move: PastMove, now: float) -> dict[str, Any]:
    return {
        "channel": name,
        "age_s": now - move.at,
        "from": ",".join(move.before.servers),
        "to": ",".join(move.after.servers),
        "mode_before": mode_name(move.before.mode),
        "mode_after": mode_name(move.after.mode),
        "goal": move.goal,
        "reason": move.reason,
    }
