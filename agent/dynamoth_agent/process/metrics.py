"""The metrics of an agent, as Prometheus reads them. The only label is the id of its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from dynamoth_agent.machine import AgentMachine
from dynamoth_daemon import metrics

_OF_REPORT = (
    ("server_load_ratio", "Measured over maximum outgoing bytes per second", "load_ratio"),
    ("server_tightest_ratio", "How full the tightest resource of the server is", "tightest_ratio"),
    ("server_outgoing_bytes_per_second", "What Redis sends to clients", "outgoing_bytes_per_s"),
    ("server_control_bytes_per_second", "What Redis sends to balancers and operators", "control_bytes_per_s"),
    ("server_outgoing_max_bytes_per_second", "What the server can send, as configured", "outgoing_bytes_per_s_max"),
    ("server_incoming_bytes_per_second", "What the Redis server receives", "incoming_bytes_per_s"),
    ("server_cpu_ratio", "CPU use of the thread of Redis that executes commands", "cpu_ratio"),
    ("server_memory_bytes", "Memory that Redis uses", "memory_bytes"),
    ("server_memory_max_bytes", "maxmemory of Redis; 0 for none", "memory_bytes_max"),
    ("server_connections", "Clients that are connected to Redis", "connections"),
    ("server_connections_max", "maxclients of Redis", "connections_max"),
    ("server_output_buffer_max_bytes", "Largest output buffer of any client lately", "output_buffer_bytes_max"),
    ("server_client_buffers_bytes", "Memory of all clients' buffers", "client_buffers_bytes"),
    ("server_channels_subscribed", "Channels that have a subscriber", "channels_subscribed"),
    (
        "agent_report_estimated",
        "1 while Redis refuses INFO, and outgoing bytes are estimated",
        "outgoing_is_estimate",
    ),
)
"""Name, help, and the attribute of the latest report."""

_COUNTERS_OF_ANALYZER = {
    "messages_observed": "Messages that the agent has seen, on all channels",
    "publications": "Messages that clients have published at the server",
    "messages_sent": "Copies that Redis has sent to subscribers by name",
    "messages_untracked": "Messages on channels that there was no room to follow",
    "publishers_uncounted": "Pairs of channel and publisher that there was no room to distinguish",
    "announcements_malformed": "Announcements of clients that could not be read",
    "announcements_dropped": "Announcements of clients that there was no room for",
    "replies_refused": "Commands of the load analyzer that Redis refused",
    "intervals_late": "Intervals whose observation was later than lag_s_max",
    "interruptions": "Times that the observation was interrupted",
    "discoveries_left_out": "Times that idle channels were not looked for as there were too many, or INFO is refused",
    "reports_sent": "Reports sent to the balancer",
    "reports_unheard": "Reports that no balancer was subscribed to",
}

_COUNTERS_OF_DISPATCHER = {
    "forwarded_messages": "Copies of messages forwarded to other locations",
    "redirected_publishers": "Publishers that were notified of a newer route",
    "route_notices": "Notices of a newer route sent to subscribers",
    "forwards_lost": "Copies that were not forwarded, as too many waited already",
    "forwards_refused": "Forwarded copies that the other server refused",
    "backlog_dropped": "Messages that were observed before the plan was known, and that there was no room for",
    "relays_refused": "Relayed messages dropped, as they were for channels that take no relays",
    "relayed_evicted": "Channels whose relayed messages were forgotten, as there were too many",
    "raw_channels_evicted": "Channels whose numbering of raw messages was forgotten, as there were too many",
    "heartbeats_evicted": "Heartbeats that were sent early, as too many waited",
    "at_rest_evicted": "Channels at rest that were forgotten, as there were too many",
    "refused_commands": "Commands of the dispatcher that Redis refused",
    "malformed_messages": "Envelopes and control messages that could not be read",
    "malformed_plans": "Stored plans and changes that could not be read",
    "unexpected_messages": "Control messages that are not for an agent",
}


def make_registry(machine: AgentMachine, clock: Callable[[], float]) -> CollectorRegistry:
    """Return a registry with the metrics of an agent and of its process; ``clock`` is the machine's."""
    return metrics.make_registry("agent", lambda: _collect(machine, clock()))


def _collect(machine: AgentMachine, now: float) -> Iterator[Metric]:
    analyzer = machine.load_analyzer
    families = metrics.Families("dynamoth_", {"server": machine.server})
    gauge = families.gauge
    yield gauge("agent_link_up", "1 while the agent is connected to its Redis server", machine.is_up)
    yield gauge("agent_ready", "1 while the agent observes its server and knows a plan", machine.is_ready)
    if machine.plan_version is not None:
        yield gauge("agent_plan_version", "Version of the plan acted upon", machine.plan_version)
    lag_s = analyzer.observation_lag_s(now)
    yield gauge("agent_observation_lag_seconds", "How late the agent sees what is published", lag_s)
    yield gauge("agent_channels_tracked", "Channels that the agent follows", len(analyzer.channels))
    yield gauge("agent_blind", "1 while the agent does not see what is published", machine.stand_in.blind)
    transitions = len(machine.dispatcher.transitions)
    yield gauge("dispatcher_transitions", "Channels in transition at the server", transitions)
    yield from families.counters(_COUNTERS_OF_ANALYZER, analyzer.counters, "lla_")
    yield from families.counters(_COUNTERS_OF_DISPATCHER, machine.dispatcher.counters, "dispatcher_")
    blind_s = analyzer.blind_s_total
    yield families.counter("lla_blind_seconds", "Time in which the agent was not connected and saw nothing", blind_s)
    if analyzer.last_report is not None:
        for name, text, attribute in _OF_REPORT:
            yield gauge(name, text, getattr(analyzer.last_report, attribute))
