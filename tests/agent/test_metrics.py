from __future__ import annotations

import re

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dynamoth.machine.events import LinkUp, Pushed, Start
from dynamoth_agent.process.metrics import make_registry
from tests.agent.bench import Bench
from tests.compose.metric_series import hostile_channels, series_of
from tests.lla.harness import push


def scrape(bench: Bench) -> str:
    return generate_latest(make_registry(bench.machine, lambda: bench.now)).decode()


def value(text: str, name: str) -> float | None:
    found = re.search(rf'^{name}{{server="s1"}} (\S+)$', text, re.MULTILINE)
    return None if found is None else float(found[1])


def reported() -> Bench:
    bench = Bench()
    bench.up()
    bench.tell(Pushed("local", [push(b"a", b"plain")] * 3))
    while bench.machine.load_analyzer.last_report is None:
        bench.to_next_deadline()
    return bench


def test_before_the_connection_nothing_is_claimed() -> None:
    bench = Bench()
    bench.tell(Start())
    text = scrape(bench)
    assert value(text, "dynamoth_agent_link_up") == 0
    assert value(text, "dynamoth_agent_ready") == 0
    assert value(text, "dynamoth_agent_plan_version") is None
    assert value(text, "dynamoth_server_load_ratio") is None
    assert value(text, "dynamoth_lla_reports_sent_total") == 0


def test_what_the_machines_know_is_reported() -> None:
    bench = reported()
    text = scrape(bench)
    assert value(text, "dynamoth_agent_ready") == 1
    assert value(text, "dynamoth_agent_plan_version") == 0
    assert value(text, "dynamoth_server_load_ratio") == 0
    assert value(text, "dynamoth_lla_messages_observed_total") == 3
    assert value(text, "dynamoth_lla_publications_total") == 3
    bench.machine.dispatcher.counters["forwarded_messages"] += 2
    assert value(scrape(bench), "dynamoth_dispatcher_forwarded_messages_total") == 2


def test_the_lag_is_that_of_now() -> None:
    bench = Bench()
    bench.tell(Start())
    bench.tell(LinkUp("local", "run1"), answer=False)
    bench.now += 4.0
    assert value(scrape(bench), "dynamoth_agent_observation_lag_seconds") == 4.0


def test_conventions() -> None:
    """One prefix, HELP everywhere, counters end in _total, labels by server only, no channel anywhere."""
    text = scrape(reported())
    families = [
        family for family in text_string_to_metric_families(text) if not family.name.startswith(("process_", "python_"))
    ]
    assert len(families) > 40
    for family in families:
        assert re.fullmatch(r"dynamoth_[a-z_]+", family.name), family.name
        assert family.documentation, family.name
        for sample in family.samples:
            labels = {"version", "component"} if family.name == "dynamoth_build_info" else {"server"}
            assert set(sample.labels) == labels, sample
    assert "process_cpu_seconds_total" in text


def test_every_counter_of_the_machines_has_a_text() -> None:
    """A counter that is added to a machine is shown anyhow; here it is made to get words of its own."""
    bench = reported()
    text = scrape(bench)
    for owner, counters in (
        ("lla", bench.machine.load_analyzer.counters),
        ("dispatcher", bench.machine.dispatcher.counters),
    ):
        for name in counters:
            found = re.search(rf"^# HELP dynamoth_{owner}_{name}_total (.*)$", text, re.MULTILINE)
            assert found is not None and found[1] != name.replace("_", " "), name


def test_the_number_of_series_does_not_depend_on_channels() -> None:
    bench = reported()
    registry = make_registry(bench.machine, lambda: bench.now)
    before = series_of(registry)
    names = hostile_channels(10_000)
    for first in range(0, len(names), 1000):
        bench.tell(Pushed("local", [push(name, b"plain") for name in names[first : first + 1000]]))
        bench.to_next_deadline()
    end = bench.now + 2.0  # what was observed counts when its report is made
    while bench.now < end:
        bench.to_next_deadline()
    assert value(scrape(bench), "dynamoth_lla_messages_observed_total") == 3 + len(names)
    assert series_of(registry) == before
