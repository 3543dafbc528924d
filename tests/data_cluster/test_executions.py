"""Executions of standing queries, on real Spark and Redis."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from dynamoth.data.progress import Window, WindowEnd, begin_again_command, query_server, restart_key
from dynamoth.edge.log import log_keys
from dynamoth_analytics.cluster import outdated, query_runner
from dynamoth_analytics.cluster.dropping import end_dropped
from dynamoth_analytics.cluster.query_runner import ExecutionFailed, QueryRunner
from dynamoth_analytics.cluster.servers import LogServerFailed
from dynamoth_analytics.cluster.sql import nulls
from dynamoth_analytics.cluster.sql.compiled import CompiledQuery
from tests.data_cluster.world import TIMEOUT_S, World, reports, stream_session, until

BEGIN: WindowEnd = {"tick_ms": 0, "offsets": {}}


@contextmanager
def running(*runners: QueryRunner) -> Generator[None]:
    """Stop queries at the end; an execution that runs may end."""
    try:
        yield
    finally:
        for runner in runners:
            runner.stop(10.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are tried again soon."""
    monkeypatch.setattr(query_runner, "RETRY_S", 0.1)
    monkeypatch.setattr(query_runner, "RETRY_S_MAX", 0.5)


def test_records_become_result_sets_of_those_who_are_interested(driver: SparkSession, world: World) -> None:
    dataset, query = world.set_dataset(), world.set_query()
    world.append(dataset, *reports("fire", "before"))
    fire, flood, none = (world.register("of_type", {"type": each}) for each in ("fire", "flood", "none"))
    runner = world.runner(world.context(driver), query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.append(dataset, *reports("fire", "f1", "f2"), *reports("flood", "w1"))
        until(lambda: len(world.ids(fire)) == 2 and world.ids(flood), runner)
        late = world.register("of_type", {"type": "quake"})
        world.append(dataset, *reports("quake", "q1"), *reports("fire", "f3"))
        until(lambda: world.ids(late) and len(world.ids(fire)) == 3, runner)
    assert sorted(world.ids(fire)) == ["f1", "f2", "f3"], "what was there before the query is not in it"
    assert world.ids(flood) == ["w1"]
    assert not world.log(none), "an interest without rows gets no result set"
    written = world.executions("of_type")
    assert [each["execution"] for each in written] == [*range(1, len(written) + 1)]
    for before, after in pairwise(written):
        assert after["start"] == before["end"], "windows follow each other"
    assert all(each["end"]["sealed_ms"] >= each["end"]["tick_ms"] for each in written)
    assert sum(each["rows"] for each in written) == 5
    progress, status = world.progress("of_type"), world.status("of_type")
    assert progress is not None
    assert (progress.execution, progress.is_done) == (len(written), True)
    assert status is not None
    assert (status.state, status.execution, status.interests) == ("running", len(written), 4)
    assert status.counts["rows"] == 5


def test_who_is_registered_before_a_window_is_sealed_is_part_of_it(driver: SparkSession, world: World) -> None:
    """Also behind its tick: records that were stored after that may be in the window."""
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    world.append(dataset, *reports("fire", "a"))
    context = world.context(driver)
    runner = world.runner(context, query, dataset)
    runner.executions.interests.refresh()
    registered_ms = driver.read.parquet(str(runner.executions.interests.file(2**52)[0])).collect()[0]["_registered"]
    for execution, sealed_ms in enumerate((registered_ms - 1, registered_ms), 1):
        tips = world.servers.tips({"reports": 2})
        end: WindowEnd = {"tick_ms": registered_ms - 500, "sealed_ms": sealed_ms, "offsets": tips}
        runner.executions.run(stream_session(driver), execution, Window(BEGIN, end))
    assert [payload["execution"] for payload in world.log(interest)] == [2]


def test_without_its_checkpoint_a_query_goes_on_exactly(driver: SparkSession, world: World) -> None:
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    runner = world.runner(world.context(driver), query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.append(dataset, *reports("fire", "a"))
        until(lambda: world.progress("of_type") is not None and world.status("of_type").execution, runner)  # type: ignore[union-attr]
    world.append(dataset, *reports("fire", "b"))
    shutil.rmtree(world.folder / "checkpoints")
    again = world.runner(world.context(driver), query, dataset)
    with running(again):
        until(lambda: len(world.ids(interest)) == 2, again)
    assert world.ids(interest) == ["a", "b"]
    assert [each["execution"] for each in world.log(interest)] == [1, 2]


@pytest.mark.parametrize(("names", "index"), [("commits/*", -1), ("offsets/*", -1), ("offsets/*", -2), ("meta*", 0)])
def test_a_query_goes_on_exactly_when_spark_cannot_read_its_files(
    driver: SparkSession, world: World, names: str, index: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power failure: Spark does not force them to disk."""
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    runner = world.runner(world.context(driver), query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        for number, id_ in enumerate("ab", 1):
            world.append(dataset, *reports("fire", id_))
            until(lambda: runner.status.execution == number, runner)  # noqa: B023
    found = (world.folder / "checkpoints" / "of_type" / "spark").glob(names)
    file = sorted(each for each in found if not each.name.startswith("."))[index]
    file.write_bytes(b"")
    file.with_name(f".{file.name}.crc").write_bytes(b"")
    world.append(dataset, *reports("fire", "c"))
    again = world.runner(world.context(driver), query, dataset)
    with running(again):
        until(lambda: len(world.ids(interest)) == 3, again)
        until(lambda: again.status.execution == 3, again)
    assert world.ids(interest) == ["a", "b", "c"]
    assert again.status.counts["failures"] == 1
    assert "No content to map" in caplog.text if names == "meta*" else f"{file}. Incomplete log file" in caplog.text
    written = world.executions("of_type")
    assert [each["execution"] for each in written] == [1, 2, 3]
    assert [after["start"] == before["end"] for before, after in pairwise(written)] == [True, True]


def test_an_execution_that_spark_repeats_although_it_is_done_counts_once(driver: SparkSession, world: World) -> None:
    """As after a power failure: the file in which Spark notes the end of an execution is lost."""
    dataset, query = world.set_dataset(), world.set_query()
    world.register("of_type", {"type": "fire"})
    runner = world.runner(world.context(driver), query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        for number, id_ in enumerate("ab", 1):
            world.append(dataset, *reports("fire", id_))
            until(lambda: runner.status.execution == number, runner)  # noqa: B023
    before = world.status("of_type")
    assert before is not None
    commits = world.folder / "checkpoints" / "of_type" / "spark" / "commits"
    for name in ("1", ".1.crc"):
        (commits / name).unlink(missing_ok=True)  # Spark may not have come to it
    again = world.runner(world.context(driver), query, dataset)
    with running(again):
        until(lambda: (commits / "1").exists(), again)
        assert again.status.counts == before.counts
        assert (again.status.execution, again.status.interests) == (2, 1)
        assert (again.status.seconds, again.status.ended_ms) == (before.seconds, before.ended_ms)
        world.append(dataset, *reports("fire", "c"))
        until(lambda: again.status.execution == 3, again)
    assert again.status.counts["executions"] == 3


def test_an_execution_that_was_published_in_part_is_repeated_once_for_each(driver: SparkSession, world: World) -> None:
    """As after a crash: the checkpoint is lost, too, and the execution has begun and not ended."""
    dataset, query = world.set_dataset(), world.set_query()
    interests = {each: world.register("of_type", {"type": each}) for each in ("fire", "flood", "quake", "storm")}
    spoiled = interests["quake"]
    runner = world.runner(replace(world.context(driver), append_retry_s=0.0), query, dataset)
    meta = log_keys(spoiled)[0]
    world.servers.run(world.server_of(spoiled), (b"SET", meta, b"not a hash"))
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.append(dataset, *(report for each in interests for report in reports(each, f"{each} 1")))
        until(lambda: runner.is_failing, runner)
    assert runner.status.reason.startswith("log server")
    assert sum(len(world.log(each)) for each in interests.values() if each != spoiled) > 0, "a part was published"
    progress = world.progress("of_type")
    assert progress is not None
    assert not progress.is_done
    shutil.rmtree(world.folder)
    world.servers.run(world.server_of(spoiled), (b"DEL", meta))
    world.append(dataset, *reports("fire", "fire 2"))
    again = world.runner(world.context(driver), query, dataset)
    with running(again):
        until(lambda: len(world.ids(interests["fire"])) == 2, again)
    for type_, interest in interests.items():
        expected = [f"{type_} 1"] + ["fire 2"] * (type_ == "fire")
        assert world.ids(interest) == expected
    assert world.executions("of_type")[0]["repeated"] > 0


def test_a_query_that_fails_loses_nothing_and_harms_no_other(
    driver: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(nulls.LITERALS, "sequence", ())  # else the query is refused, as it can fail
    dataset = world.set_dataset()
    good = world.set_query("good")
    fails = "cardinality(sequence(CAST(r.size AS int), 4, 1)) AS ok"  # of a size above 5 there is no such sequence
    bad = world.set_query("bad", sql=f"SELECT r.id, {fails} FROM reports r WHERE r.type = :type")
    interests = [world.register(each, {"type": "fire"}) for each in ("good", "bad")]
    context = world.context(driver)
    runners = [world.runner(context, each, dataset) for each in (good, bad)]
    with running(*runners):
        until(lambda: all(each.status.state == "running" for each in runners), *runners)
        world.append(dataset, *reports("fire", "tiny"))
        until(lambda: all(world.ids(each) for each in interests), *runners)
        world.append(dataset, *reports("fire", "too large"))
        until(lambda: runners[1].status.counts.get("failures", 0) >= 2, *runners)
        world.append(dataset, *reports("fire", "next"))
        until(lambda: len(world.ids(interests[0])) == 3, *runners)
        status = world.status("bad")
        assert status is not None
        assert status.state == "failing"
        assert "sequence" in status.reason
        assert not runners[0].is_failing
        assert world.ids(interests[1]) == ["tiny"]
        runners[1].stop()
        mended = world.set_query("bad", version=2)
        runners[1] = world.runner(context, mended, dataset)
        until(lambda: len(world.ids(interests[1])) == 3, *runners)
    assert sorted(world.ids(interests[1])) == ["next", "tiny", "too large"]
    assert [each["version"] for each in world.log(interests[1])][0::2] == [1, 2]


def test_an_overrun_is_counted_and_covered(driver: SparkSession, world: World) -> None:
    dataset = world.set_dataset()
    query = world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    runner = world.runner(world.context(driver), query, dataset)
    run = runner.executions.run
    with pytest.MonkeyPatch.context() as patch, running(runner):
        until(lambda: runner.status.state == "running", runner)

        def executing(*arguments: object) -> object:
            """Take so long that ticks pass, while records come."""
            counts = run(*arguments)  # type: ignore[arg-type]
            if not world.executions("of_type"):
                begun = world.servers.now_ms()
                world.append(dataset, *reports("fire", "b"))
                until(lambda: world.servers.now_ms() > begun + 3000)
                world.append(dataset, *reports("fire", "c"))
            return counts

        patch.setattr(runner.executions, "run", executing)
        world.append(dataset, *reports("fire", "a"))
        until(lambda: len(world.ids(interest)) == 3, runner)
        until(lambda: not runner._executing.locked(), runner)  # pyright: ignore[reportPrivateUsage]
    assert world.rows(interest)[1:] == [[{"id": "b", "size": 1}, {"id": "c", "size": 1}]], "both are in one execution"
    assert runner.status.counts["overruns"] == 1
    assert runner.status.counts["ticks_missed"] >= 1


def test_a_continuous_query_is_executed_when_there_are_records(driver: SparkSession, world: World) -> None:
    dataset, query = world.set_dataset(), world.set_query(period_s=0)
    interest = world.register("of_type", {"type": "fire"})
    runner = world.runner(world.context(driver), query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        for each in ("a", "b"):
            world.append(dataset, *reports("fire", each))
            until(lambda now=each: now in world.ids(interest), runner)  # type: ignore[misc]
    assert world.ids(interest) == ["a", "b"]
    ticks = [each["end"]["tick_ms"] for each in world.executions("of_type")]
    assert all(after - before >= 1000 for before, after in pairwise(ticks)), "at most once a second"
    assert "overruns" not in runner.status.counts


def test_an_execution_has_as_many_jobs_for_300_interests_as_for_one(driver: SparkSession, world: World) -> None:
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "0"})
    runner = world.runner(world.context(driver), query, dataset)
    tracker = driver.sparkContext.statusTracker()
    jobs: list[int] = []
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        for others in (0, 299):
            for number in range(others):
                world.register("of_type", {"type": f"other {number}"})
            world.append(dataset, *reports("0", f"with {others} others"))
            until(lambda now=f"with {others} others": now in world.ids(interest), runner)  # type: ignore[misc]
            until(lambda: not runner._executing.locked(), runner)  # pyright: ignore[reportPrivateUsage]
            stream = runner._stream  # pyright: ignore[reportPrivateUsage]
            assert stream is not None
            jobs.append(len(tracker.getJobIdsForGroup(str(stream.runId))) - sum(jobs))
    assert [each["interests"] for each in world.executions("of_type")] == [1, 300]
    assert jobs[0] == jobs[1] > 0


def test_a_dropped_query_says_so_once_and_can_come_back(driver: SparkSession, world: World) -> None:
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    context = world.context(driver)
    runner = world.runner(context, query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.append(dataset, *reports("fire", "a"))
        until(lambda: runner.status.execution, runner)
    logs = world.log_keys()
    for _ in range(2):
        end_dropped(context, "of_type", 2)
    assert world.log_keys() == logs, "nothing is published besides"
    dropped = world.log(interest)[-1]
    assert dropped.pop("until") > world.log(interest)[0]["until"]
    assert dropped == {"query": "of_type", "version": 1, "execution": 2, "dropped": True}
    assert len(world.log(interest)) == 2
    status = world.status("of_type")
    assert status is not None
    assert status.state == "dropped"
    end_dropped(context, "of_type", 4)  # it was registered and dropped again, before any execution
    assert [each.get("dropped") for each in world.log(interest)] == [None, True, True]
    world.append(dataset, *reports("fire", "unseen"))
    back = world.runner(context, replace(query, version=5), dataset)
    with running(back):
        until(lambda: (world.folder / "checkpoints" / "of_type" / "base.json").exists(), back)
        world.append(dataset, *reports("fire", "b"))
        until(lambda: len(world.log(interest)) == 4, back)
    last = world.log(interest)[-1]
    assert (last["version"], last["execution"], last["rows"]) == (5, 4, [{"id": "b", "size": 1}])


@pytest.mark.parametrize("ended_late", [False, True])
def test_a_query_that_comes_back_misses_no_record_behind_its_registration(
    driver: SparkSession, world: World, ended_late: bool
) -> None:
    """The data cluster may end it before the registration, or only then; it executes it at any time later."""
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    context = world.context(driver)
    world.append(dataset, *reports("fire", "before"))
    if not ended_late:
        end_dropped(context, "of_type", 2)
    tips = world.servers.tips({"reports": dataset.partitions})
    server = query_server("of_type", world.servers.ids)
    world.servers.run(server, begin_again_command("of_type", {"tick_ms": 0, "offsets": tips}))
    world.append(dataset, *reports("fire", "seen"))
    if ended_late:
        end_dropped(context, "of_type", 2)
    back = world.runner(context, replace(query, version=3), dataset)
    with running(back):
        until(lambda: world.ids(interest), back)
    assert world.ids(interest) == ["seen"]


def test_a_query_that_comes_back_before_all_logs_have_its_end_loses_no_result_set(
    driver: SparkSession, world: World
) -> None:
    """A log that has the last publication does not take an execution of the same number."""
    dataset, query = world.set_dataset(), world.set_query()
    fire, quake = (world.register("of_type", {"type": each}) for each in ("fire", "quake"))
    assert (world.server_of(fire), world.server_of(quake)) == ("l1", "l2")
    context = replace(world.context(driver), append_retry_s=0.0)
    world.servers.run("l2", (b"CONFIG", b"SET", b"min-replicas-to-write", b"1"))  # it stores nothing
    with pytest.raises(LogServerFailed, match="NOREPLICAS"):
        end_dropped(context, "of_type", 2)
    world.servers.run("l2", (b"CONFIG", b"SET", b"min-replicas-to-write", b"0"))
    back = world.runner(context, replace(query, version=3), dataset)
    with running(back):
        until(lambda: (world.folder / "checkpoints" / "of_type" / "base.json").exists(), back)
        world.append(dataset, *reports("fire", "f1"), *reports("quake", "q1"), partition=0)
        until(lambda: world.ids(quake), back)
    assert (world.ids(fire), world.ids(quake)) == (["f1"], ["q1"])
    for interest in (fire, quake):
        assert [payload.get("dropped") for payload in world.log(interest)] == [True, None]


def test_interests_that_do_not_fit_a_changed_query_get_a_last_result(
    driver: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outdated, "BROKERS_KNOW_S", 0.0)
    dataset = world.set_dataset()
    sql = "SELECT r.id FROM reports r WHERE r.type = :type AND r.size >= :least"
    changed = world.set_query(version=2, parameters={"type": "string", "least": "int"}, sql=sql)
    old, new = world.register("of_type", {"type": "fire"}), world.register("of_type", {"type": "fire", "least": 1})
    runner = world.runner(world.context(driver), changed, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.append(dataset, *reports("fire", "a"))
        until(lambda: world.ids(new), runner)
        world.append(dataset, *reports("fire", "b"))
        until(lambda: len(world.ids(new)) == 2, runner)
    [last] = world.log(old)
    assert (last["version"], "'least' is missing" in last["error"]) == (2, True)


def test_a_query_that_is_stopped_in_its_first_batch_goes_on_without_a_failure(
    driver: SparkSession, world: World
) -> None:
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    runner = world.runner(world.context(driver), query, dataset)
    files = world.folder / "checkpoints" / "of_type" / "spark"
    with running(runner):
        until(lambda: runner._window_start is not None, runner)  # pyright: ignore[reportPrivateUsage]
        runner.stop()
        # As if it had been stopped even earlier: Spark refuses to start beside the rest.
        shutil.rmtree(files / "offsets")
        (files / "state").mkdir(exist_ok=True)
        (files / "state" / "left").write_text("")
        world.append(dataset, *reports("fire", "a"))
        until(lambda: world.ids(interest), runner)
    assert "failures" not in runner.status.counts


def test_an_operator_can_have_a_query_go_on_behind_everything(driver: SparkSession, world: World) -> None:
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    context = world.context(driver)
    runner = world.runner(context, query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.append(dataset, *reports("fire", "a"))
        until(lambda: runner.status.execution, runner)
        runner.stop()
        world.append(dataset, *reports("fire", "skipped"))
        server = query_server("of_type", world.servers.ids)
        world.servers.run(server, (b"SET", restart_key("of_type"), b"1"))
        runner.restart()
        assert world.servers.run(server, (b"EXISTS", restart_key("of_type"))) == 0
        until(lambda: runner._stream is not None, runner)  # pyright: ignore[reportPrivateUsage]
        world.append(dataset, *reports("fire", "b"))
        until(lambda: len(world.log(interest)) == 2, runner)
    assert world.ids(interest) == ["a", "b"]
    assert [each.get("skipped", False) for each in world.executions("of_type")] == [False, True, False]


def test_a_query_that_reads_another_dataset_now_begins_there_at_its_end(driver: SparkSession, world: World) -> None:
    dataset, other = world.set_dataset(), world.set_dataset("alarms")
    query = world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    context = world.context(driver)
    runner = world.runner(context, query, dataset, other)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.append(dataset, *reports("fire", "a"))
        world.append(other, *reports("fire", "before"))
        until(lambda: runner.status.execution, runner)
    changed = world.set_query(on="alarms", sql="SELECT r.id, r.size FROM alarms r WHERE r.type = :type", version=2)
    runner = world.runner(context, changed, dataset, other)
    with running(runner):
        until(lambda: runner._stream is not None, runner)  # pyright: ignore[reportPrivateUsage]
        world.append(other, *reports("fire", "b"))
        until(lambda: len(world.ids(interest)) == 2, runner)
    assert world.ids(interest) == ["a", "b"]


def test_a_result_set_that_is_too_large_is_an_error(driver: SparkSession, world: World) -> None:
    dataset, query = world.set_dataset(), world.set_query(result_bytes_max=1024)
    large, small = (world.register("of_type", {"type": each}) for each in ("fire", "flood"))
    runner = world.runner(world.context(driver), query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.append(dataset, *reports("fire", *(f"{number:020d}" for number in range(50))), *reports("flood", "w"))
        until(lambda: world.log(large) and world.log(small), runner)
    (found,) = world.log(large)
    assert "rows" not in found
    assert found["error"].startswith("the result set has 50 rows and ")
    assert world.ids(small) == ["w"]
    assert world.executions("of_type")[0]["too_large"] == 1


def test_a_query_on_offsets_that_are_given_again_fails_until_that_is_mended(driver: SparkSession, world: World) -> None:
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    again = {"reports/1": "log server l1 gives offsets again"}
    runner = world.runner(replace(world.context(driver), offsets_again=again), query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.append(dataset, *reports("fire", "a", "b"))
        until(lambda: runner.is_failing, runner)
        assert runner.status.reason.startswith("reports/1: log server l1 gives offsets again, and then")
        assert not world.log(interest)
        again.clear()
        until(lambda: len(world.ids(interest)) == 2, runner)


def test_a_former_data_cluster_is_refused(driver: SparkSession, world: World) -> None:
    dataset, query = world.set_dataset(), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    former = world.context(driver)
    runner = world.runner(former, query, dataset)
    with running(runner):
        until(lambda: runner.status.state == "running", runner)
        world.context(driver)
        world.append(dataset, *reports("fire", "a"))
        until(former.fenced.is_set, runner)
    assert world.log(interest) == []
    progress = world.progress("of_type")
    assert progress is not None
    assert progress.execution == 0


def test_a_former_data_cluster_changes_no_window_of_one_with_the_same_folder(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs while it waits for a tick, and goes on in the middle of the newer one's execution. Without Spark."""
    dataset, query = world.set_dataset(), world.set_query()

    def accepts_all(*_: Any) -> list[Any]:
        return []

    no_spark, rows = cast("Any", None), cast("Any", SimpleNamespace(sparkSession=None))
    monkeypatch.setattr(CompiledQuery, "check", accepts_all)
    hangs, goes_on, errors = threading.Event(), threading.Event(), list[BaseException]()

    def finds_nothing(*_: Any) -> Counter[str]:
        return Counter()

    def begun() -> Any:
        runner: Any = world.runner(world.context(no_spark), query, dataset)
        monkeypatch.setattr(runner.executions, "run", finds_nothing)
        runner._base = runner._prepared_checkpoint().execution
        return runner

    def hang(_tick_ms: int) -> None:
        hangs.set()
        goes_on.wait(TIMEOUT_S)

    def execute_as_the_former_one() -> None:
        try:
            former._execute(rows, 1)
        except ExecutionFailed as error:
            errors.append(error)

    def run_while_the_former_one_goes_on(*_: Any) -> Counter[str]:
        world.append(dataset, *reports("fire", "c", "d"))
        goes_on.set()
        thread.join()
        return Counter()

    former = begun()
    world.append(dataset, *reports("fire", "a", "b"))
    former._execute(rows, 0)
    monkeypatch.setattr(former, "_wait_until", hang)
    thread = threading.Thread(target=execute_as_the_former_one, daemon=True)
    thread.start()
    assert hangs.wait(TIMEOUT_S)
    newer = begun()
    monkeypatch.setattr(newer.executions, "run", run_while_the_former_one_goes_on)
    world.append(dataset, *reports("fire", "e"))
    newer._execute(rows, 1)
    assert errors, "it is refused"
    monkeypatch.setattr(newer.executions, "run", finds_nothing)
    world.append(dataset, *reports("fire", "f"))
    newer._execute(rows, 2)
    written = world.executions("of_type")
    assert [each["execution"] for each in written] == [1, 2, 3]
    for before, after in pairwise(written):
        assert after["start"] == before["end"], "windows follow each other"
