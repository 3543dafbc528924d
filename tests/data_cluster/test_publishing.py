"""What Spark's workers do with result sets, called here without Spark, on real Redis servers."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as arrow  # pyright: ignore[reportMissingTypeStubs]
import pytest
import redis

from dynamoth.data.terms import TERM_KEY
from dynamoth.edge.log import log_keys
from dynamoth.edge.publications import LoggedPublication, unpack_publication
from dynamoth.protocol.envelope import open_envelope
from dynamoth_analytics.cluster.publishing import RETRY_S, ResultPublisher
from dynamoth_analytics.cluster.servers import LogServerFailed, TakenOver
from tests.data_cluster.world import World


def publisher(world: World, **settings: Any) -> ResultPublisher:
    made = ResultPublisher(
        world.servers, world.cluster_url, "of_type", 3, 7, 1_700_000_000_000, 5, 1000, 5000, 100, 600.0
    )
    return replace(made, **settings)


def publish(how: ResultPublisher, *results: tuple[str, int, str]) -> dict[str, int]:
    """Publish results (interest, rows, JSON), one batch each; return the counts."""
    names = ("interest", "rows", "result", "bytes")
    batches = [
        arrow.RecordBatch.from_pydict({name: [each] for name, each in zip(names, (*r, len(r[2])), strict=True)})
        for r in results
    ]
    (counts,) = how.publish(batches)
    return {name: column[0] for name, column in counts.to_pydict().items()}


def interests(count: int) -> list[str]:
    return [f"{number:022d}" for number in range(count)]


@contextmanager
def heard(world: World, interest: str) -> Generator[Any]:
    """Subscribe to the notifications of an interest, at the one server of the cluster."""
    client: Any = redis.Redis.from_url(world.server_url)
    subscriber = client.pubsub(ignore_subscribe_messages=True)
    subscriber.subscribe(f"q:{interest}")
    assert subscriber.get_message(timeout=5) is None, "the confirmation"
    try:
        yield subscriber
    finally:
        subscriber.close()
        client.close()


def next_publication(subscriber: Any) -> tuple[LoggedPublication, float]:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        message = subscriber.get_message(timeout=5)
        if message is not None:
            return unpack_publication(open_envelope(message["data"]).payload), time.monotonic()
    raise AssertionError("nothing was published")


def test_a_result_set_is_stored_and_then_published(world: World) -> None:
    one, other, *_ = interests(2)
    with heard(world, one) as subscriber:
        counts = publish(publisher(world), (one, 1, '[{"id":"a"}]'), (other, 2, '[{"id":"a"},{"id":"b"}]'))
        notice, _ = next_publication(subscriber)
    assert notice.payload is not None
    assert json.loads(notice.payload) == world.log(one)[0]
    assert notice.offset == 1
    assert world.log(one) == [{
        "query": "of_type", "version": 3, "execution": 7, "until": "2023-11-14T22:13:20.000Z", "rows": [{"id": "a"}],
    }]  # fmt: skip
    assert (counts["result_sets"], counts["rows"], counts["repeated"], counts["unpublished"]) == (2, 3, 0, 0)
    assert counts["bytes"] == sum(len(json.dumps(world.log(each)[0], separators=(",", ":"))) for each in (one, other))


def test_a_repeated_execution_is_stored_once_and_published_again(world: World) -> None:
    one, *_ = interests(1)
    how = publisher(world)
    publish(how, (one, 1, "[1]"))
    with heard(world, one) as subscriber:
        counts = publish(how, (one, 1, "[1]"))
        notice, _ = next_publication(subscriber)
    assert counts["repeated"] == 1
    assert notice.offset == 1
    assert len(world.log(one)) == 1


def test_a_large_result_set_is_a_notice_and_a_larger_one_an_error(world: World) -> None:
    one, other, *_ = interests(2)
    with heard(world, one) as subscriber:
        counts = publish(publisher(world), (one, 9, json.dumps(["x" * 2000])), (other, 9, json.dumps(["x" * 6000])))
        notice, _ = next_publication(subscriber)
    assert notice.payload is None
    assert world.rows(one) == [["x" * 2000]]
    assert counts["too_large"] == 1
    assert "rows" not in world.log(other)[0]
    assert "result_bytes_max" in world.log(other)[0]["error"]


def test_a_query_whose_results_are_pulled_sends_notices_only(world: World) -> None:
    one, *_ = interests(1)
    with heard(world, one) as subscriber:
        publish(publisher(world, inline_bytes_max=-1), (one, 1, "[1]"))
        assert next_publication(subscriber)[0].payload is None


def test_a_former_data_cluster_publishes_nothing(world: World) -> None:
    one, *_ = interests(1)
    publish(publisher(world, term=6, execution=6), (one, 1, "[6]"))
    with pytest.raises(TakenOver):
        publish(publisher(world), (one, 1, "[7]"))
    assert world.rows(one) == [[6]]


def test_a_former_data_cluster_publishes_nothing_to_logs_that_the_newer_one_has_not_written(world: World) -> None:
    ids = interests(20)
    assert world.servers.take_term("newer") == 1
    assert world.servers.claim_term(6, "newer") is None
    with pytest.raises(TakenOver):
        publish(publisher(world, fence=TERM_KEY), *((each, 1, "[5]") for each in ids))
    assert not any(world.log(each) for each in ids)
    publish(publisher(world, term=6, fence=TERM_KEY), *((each, 1, "[6]") for each in ids))
    assert [world.rows(each) for each in ids] == [[[6]]] * len(ids)


def test_result_sets_whose_logs_have_later_executions_are_counted(world: World) -> None:
    one, other, *_ = interests(2)
    publish(publisher(world, execution=9), (one, 1, "[9]"))
    counts = publish(publisher(world, execution=7), (one, 1, "[7]"), (other, 1, "[7]"))
    assert (counts["overtaken"], counts["repeated"], counts["result_sets"]) == (1, 0, 2)
    assert (world.rows(one), world.rows(other)) == ([[9]], [[7]])


def test_a_log_server_that_is_tried_again_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    one, *_ = interests(1)
    world.servers.run(world.server_of(one), (b"SET", log_keys(one)[0], b"no hash"))
    with pytest.raises(LogServerFailed, match="WRONGTYPE"):
        publish(publisher(world, retry_s=3 * RETRY_S), (one, 1, "[1]"))
    assert [each.getMessage().endswith("trying again") for each in caplog.records] == [True]


def test_a_log_that_refuses_fails_the_execution_and_the_repetition_completes_it(world: World) -> None:
    ids = interests(20)
    spoiled = ids[10]
    world.servers.run(world.server_of(spoiled), (b"SET", log_keys(spoiled)[0], b"no hash"))
    results = [(each, 1, "[1]") for each in ids]
    with pytest.raises(LogServerFailed, match="WRONGTYPE"):
        publish(publisher(world, retry_s=0.0), *results)
    world.servers.run(world.server_of(spoiled), (b"DEL", log_keys(spoiled)[0]))
    assert any(world.log(each) for each in ids), "a part was stored"
    counts = publish(publisher(world), *results)
    assert counts["repeated"] > 0
    assert [world.rows(each) for each in ids] == [[[1]]] * len(ids)


def test_without_the_cluster_results_are_stored_and_brokers_find_them(world: World) -> None:
    """They compare the ends of logs."""
    one, *_ = interests(1)
    how = publisher(world, cluster_url="dynamoth://127.0.0.1:1?socket_timeout=1")
    counts = publish(how, (one, 1, "[1]"))
    assert counts["unpublished"] == 1
    assert world.rows(one) == [[1]]


def test_many_result_sets_are_published_in_a_moment(world: World) -> None:
    ids = interests(10_000)
    batch = arrow.RecordBatch.from_pydict(
        {"interest": ids, "rows": [1] * len(ids), "result": ['[{"id":"x"}]'] * len(ids), "bytes": [12] * len(ids)}
    )
    how = publisher(world)
    began = time.process_time()
    (counts,) = how.publish([batch])
    seconds = time.process_time() - began
    assert counts.to_pydict()["result_sets"] == [len(ids)]
    assert sum(len(world.log(each)) for each in ids[::100]) == 100
    assert seconds < 10, f"{seconds:.1f} CPU seconds for 10,000"
    print(f"{seconds:.2f} CPU seconds for 10,000")  # noqa: T201 - shown with -s
