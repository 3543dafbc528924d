"""Scenarios of what operators ask of the balancer's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamoth.plan.plan import Plan
from dynamoth_sim.load.clients import PublisherApp
from dynamoth_sim.scenarios.stage import LITTLE_BYTES_PER_S, PATIENCE_S, Scenario, Stage

PERIOD_S = 0.02

AVERAGED_S = 1.5
"""Longer than what the balancer averages over."""


def _publish(stage: Stage, publisher: PublisherApp, duration_s: float) -> None:
    """Publish on each channel of a publisher for so long: about 50 KB/s on each."""
    for _ in range(round(duration_s / PERIOD_S)):
        for channel in publisher.channels:
            publisher.publish(channel, size_bytes=1000)
        stage.run(PERIOD_S)


def _ask(stage: Stage, publisher: PublisherApp, command: str, **arguments: Any) -> Mapping[str, Any]:
    """Ask the balancer while the load goes on; return the result."""
    request = stage.cluster.ask(command, arguments)
    for _ in range(round(PATIENCE_S / PERIOD_S)):
        if request in stage.cluster.answers:
            break
        _publish(stage, publisher, PERIOD_S)
    answer = stage.cluster.answers.get(request, "no answer")
    stage.expect(f"the balancer does {command} {arguments}: {answer}", answer is None)
    return stage.cluster.results.get(request, {})


def _plan(stage: Stage) -> Plan:
    plan = stage.cluster.newest_plan()
    assert plan is not None, "a cluster that was opened stores a plan"
    return plan


def rehearsed(stage: Stage) -> None:
    """Case 73. A paused balancer shows what it would do, and changes nothing; when an operator says so, it does it."""
    channels = [stage.channel_at("s1", name) for name in ("a", "b", "c")]
    stage.subscriber("S", *channels)
    publisher = stage.publisher("P", *channels)
    _ask(stage, publisher, "pause")
    _publish(stage, publisher, AVERAGED_S)
    before = _plan(stage)
    rehearsal = _ask(stage, publisher, "rebalance", dry_run=True)
    explained = _ask(stage, publisher, "explain", name=channels[0])
    _publish(stage, publisher, AVERAGED_S)
    stage.expect("asking changes nothing", _plan(stage).version == before.version)
    moves = rehearsal.get("first_moves", [])
    stage.expect("the balancer would relieve s1", bool(moves) and {move["from"] for move in moves} == {"s1"})
    stage.expect("a channel shows its load", explained.get("load", {}).get("subscribers") == 1)
    done = _ask(stage, publisher, "rebalance", timeout_s=PATIENCE_S)
    moved = {move["channel"] for move in done.get("first_moves", [])}
    is_moved = bool(moved) and moved <= _plan(stage).entries.keys()
    stage.expect("the balancer has moved channels, though it is paused", is_moved)
    stage.expect(f"it has settled: {done.get('progress')}", done.get("progress") in ("settled", "measured"))
    stage.expect("its move is a decision with a number", done.get("number") == 1)
    _publish(stage, publisher, 2 * AVERAGED_S)
    decisions = _ask(stage, publisher, "status").get("decisions", [])
    measured = [ratios["measured"] for decision in decisions for ratios in decision["load_ratios"].values()]
    stage.expect(f"what came of it was measured: {measured}", bool(measured) and None not in measured)
    stage.expect("a paused balancer does nothing more", _plan(stage).version - before.version <= VERSIONS_OF_ONE_PLAN)


def pinned(stage: Stage) -> None:
    """Case 75. A pinned channel stays, however busy it is, and a pause lasts: also when the balancer is restarted."""
    hot, others = stage.channel_at("s1", "hot"), [stage.channel_at("s1", name) for name in ("a", "b")]
    stage.subscriber("S", hot, *others)
    publisher = stage.publisher("P", hot, hot, *others)
    _ask(stage, publisher, "pin", channel=hot, to="s1")
    _ask(stage, publisher, "pause")
    version = _plan(stage).version
    stage.cluster.restart_balancer()
    _publish(stage, publisher, 3 * AVERAGED_S)
    is_paused = _ask(stage, publisher, "status").get("paused")
    decided = [move for record in stage.records("decides") for move in record.note.moves]
    stage.expect("the pause outlives the balancer", is_paused is True and not decided)
    stage.expect("nothing has moved", _plan(stage).version >= version and not _plan(stage).entries)
    _ask(stage, publisher, "resume")
    _publish(stage, publisher, 3 * AVERAGED_S)
    decided = [move for record in stage.records("decides") for move in record.note.moves]
    stage.expect("another channel relieves s1", bool(decided) and {move.channel for move in decided} <= {*others})
    explained = _ask(stage, publisher, "explain", name=hot)
    stage.expect("the pinned channel stays", explained.get("servers") == explained.get("pinned_to") == ["s1"], hot)


VERSIONS_OF_ONE_PLAN = 9
"""Three phases of up to three channels: one plan, however its moves fall apart."""

SCENARIOS: dict[str, Scenario] = {
    "73-rehearsed": Scenario(rehearsed, outgoing_bytes_per_s_max=LITTLE_BYTES_PER_S, replicas_max=1),
    "75-pinned": Scenario(pinned, outgoing_bytes_per_s_max=LITTLE_BYTES_PER_S, replicas_max=1),
}
