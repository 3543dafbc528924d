"""Scripts for standing queries: the moments in which a record or a result set could be lost, or come twice.

U and V are users, R reports records by way of the last broker. See ``edge.scenarios``.
"""

from __future__ import annotations

from dynamoth.data.progress import PROGRESS_SCRIPT
from dynamoth.data.records import parse_state, partition_name, state_command
from dynamoth.data.registrations import registration_keys
from dynamoth.data.terms import CLAIM_SCRIPT
from dynamoth.edge.interests import Interest, query_interest
from dynamoth_sim.data.cluster import LOOK_S
from dynamoth_sim.data.query import APPENDS_PER_COMMAND
from dynamoth_sim.data.stage import DataScenario, DataStage
from dynamoth_sim.data.users import QueryUser
from dynamoth_sim.data.world import KEEP_S, QUICK_TO_LEARN, TYPES, DataOptions, data_edge
from dynamoth_sim.edge.stage import AT_ONCE_S
from dynamoth_sim.edge.world import SHORT_BROKER_OPTIONS
from dynamoth_sim.world.redis import RedisServer

ALERTS_A, ALERTS_B = (query_interest("alerts_of", {"type": type_}) for type_ in ("a", "b"))

LOSES = DataOptions(records_may_be_lost=True, skew_s=0.0)

INTERESTS, INTERESTS_END, _ = registration_keys("alerts_of")
ALERTS = partition_name("alerts", 0)


def _other(stage: DataStage, server: RedisServer) -> RedisServer:
    return next(each for each in stage.edge.logs.values() if each is not server)


# Interests.


def registered_before_confirmed(stage: DataStage) -> None:
    """b1 cannot learn yet what U's query is: U is not confirmed, as nothing is executed for it."""
    interest = ALERTS_A
    held = _other(stage, stage.log_of(interest))
    with stage.held("b1", held.id, to_server=True):
        user = stage.new_user("U", interest)
        stage.run(AT_ONCE_S)
        stage.report(interest)
        stage.run_executions()
    stage.wait_served(user, "b1")
    stage.report(interest)
    stage.run_executions()
    stage.expect_results(user, 1)


def registered_in_a_window(stage: DataStage) -> None:
    """U subscribes, and R reports, while the data cluster reads where a window ends: the window is about U."""
    server = stage.partition_server(ALERTS)
    stage.query_user("V", ALERTS_A)
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.report(ALERTS_A)
    stage.wait_end_asked(stage.data.current, ALERTS)
    with stage.held("dc1", server.id, to_server=True):
        user = stage.query_user("U", ALERTS_B)
        stage.report(ALERTS_B)
    stage.run_executions()
    stage.expect_results(user, 1)


def comes_back_late(stage: DataStage) -> None:
    """U comes back when its interest has ended, and gets a gap: it may have missed something."""
    user = stage.query_user("U", ALERTS_A)
    stage.query_user("V", ALERTS_B)
    stage.report(ALERTS_A)
    stage.run_executions()
    user.crash()
    stage.run(2 * KEEP_S)
    stage.report(ALERTS_A)
    stage.run_executions()
    user.start()
    stage.wait_served(user)
    stage.run(AT_ONCE_S)
    stage.expect_data_gaps(1)


def log_server_loses_interests(stage: DataStage) -> None:
    """The server of U's log loses everything while no data cluster runs that knows U's interest: b1 knows it."""
    user = stage.query_user("U", ALERTS_A)
    _lose_everything(stage, ALERTS_A)
    stage.run(AT_ONCE_S)
    stage.start_data_cluster(stage.data.current)
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.expect_results(user, 1)


def log_server_loses_interests_without_users(stage: DataStage) -> None:
    """The same, and b1 has no users of the interest just then: it registers the interest for the next one."""
    stage.query_user("V", ALERTS_B, ALERTS_A).leave(ALERTS_A)
    stage.run(1.1 * SHORT_BROKER_OPTIONS.linger_s)
    _lose_everything(stage, ALERTS_A)
    stage.start_data_cluster(stage.data.current)
    user = stage.query_user("U", ALERTS_A)
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.expect_results(user, 1)


def _lose_everything(stage: DataStage, interest: Interest) -> None:
    """Kill the data cluster, and restart the log server of an interest without anything."""
    stage.data.current.kill()
    server, brokers = stage.log_of(interest), stage.edge.brokers.values()
    server.stop()
    stage.wait("brokers notice", lambda: all(each.machine.logs.faults for each in brokers))
    server.start()
    stage.wait("brokers are back", lambda: not any(each.machine.logs.faults for each in brokers))


def stays_registered(stage: DataStage) -> None:
    """U stays for longer than interests without users are kept, while no record matches."""
    user = stage.query_user("U", ALERTS_A)
    stage.run(2 * KEEP_S)
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.expect_results(user, 1)


def definition_is_elsewhere(stage: DataStage) -> None:
    """One log server has lost the definitions, and the one that has them is away: U waits, and is not refused."""
    stage.data.current.kill()
    first, second = stage.edge.logs.values()
    snapshot = second.snapshot()
    second.stop()
    first.flush()
    user = stage.new_user("U", ALERTS_A)
    stage.run(AT_ONCE_S)
    stage.expect("U waits", not stage.is_served(user))
    second.start(snapshot)
    stage.wait_served(user)


# Records.


def answer_is_lost(stage: DataStage) -> None:
    """b1 loses the answer to a record, and R2 sends it again: it is stored once."""
    _cut_during_a_report(stage, to_server=False)


def record_is_lost(stage: DataStage) -> None:
    """A record never comes to its log server: nobody has acknowledged it, so R2 sends it again."""
    _cut_during_a_report(stage, to_server=True)


def _cut_during_a_report(stage: DataStage, *, to_server: bool) -> None:
    """Cut b1 off the log server of a record, of which one way was held up; U gets the record once."""
    user, reporter = stage.query_user("U", ALERTS_A, at="b2"), stage.reporter("R2", "b1")
    stage.report(ALERTS_A, reporter)  # so b1 knows the dataset
    stage.run_executions()
    server = stage.partition_server(ALERTS)
    with stage.held("b1", server.id, to_server=to_server):
        stage.begin_report(ALERTS_A, reporter)
        stage.run(AT_ONCE_S)
        stage.cut("b1", server.id)
    stage.wait("the record is acknowledged", lambda: not reporter.is_reporting)
    stage.run_executions()
    stage.expect_results(user, 2)


def keys_are_deleted_twice(stage: DataStage) -> None:
    """All keys are deleted, and again within a second: b1 registers U again, and no offset is given twice.

    So the data cluster sees the second loss, though there is a new record already.
    """
    user = stage.query_user("U", ALERTS_A)
    stage.report(query_interest("alerts_of", {"type": "c"}))  # so b3 knows the dataset
    stage.run(1.0 - stage.world.now % 1.0)
    _delete_keys(stage)
    stage.wait("U's interest is registered", lambda: bool(stage.log_of(ALERTS_A).hash(INTERESTS)), 0.6)
    stage.report(ALERTS_A)
    stage.wait("U has the record", lambda: stage.delivered(user) == 1)
    audit, skipped = stage.data.data_audit, stage.data.data_audit.skipped
    _delete_keys(stage)
    stage.report(ALERTS_A)
    stage.wait("the data cluster finds that records are lost", lambda: audit.skipped > skipped)
    stage.run(AT_ONCE_S)
    stage.report(ALERTS_A)
    stage.wait("U has the next one", lambda: stage.delivered(user) == 2)
    stage.run_executions()


def keys_are_deleted_without_users(stage: DataStage) -> None:
    """All keys are deleted while b1 has no users of an interest: it registers the interest for the next one."""
    stage.query_user("V", ALERTS_B, ALERTS_A).leave(ALERTS_A)
    stage.run(1.1 * SHORT_BROKER_OPTIONS.linger_s)
    stage.data.current.kill()
    _delete_keys(stage)
    stage.data.register()
    stage.start_data_cluster(stage.data.current)
    user = stage.query_user("U", ALERTS_A)
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.expect_results(user, 1)


def _delete_keys(stage: DataStage) -> None:
    for server in stage.edge.logs.values():
        server.flush()


def durable_server_is_restored(stage: DataStage) -> None:
    """A log server that counts as durable comes back with an older copy, and gives offsets again.

    The data cluster notices that, though the offsets of the partition do not show it.
    """
    name, interest, unwanted = (
        partition_name("reports", 0),
        query_interest("reports_of", {"type": "a"}),
        query_interest("reports_of", {"type": "c"}),
    )
    server = stage.partition_server(name)
    assert stage.log_of(interest) is not server, "its log is at another server, which loses nothing"
    user, audit = stage.query_user("U", interest), stage.data.data_audit

    def tip() -> int:
        return parse_state(stage.data.execute(server, state_command(name))).offset

    def report_up_to(offset: int, what: Interest) -> None:
        while tip() < offset:
            stage.report(what)

    report_up_to(1, interest)
    stage.run_executions()
    snapshot = server.snapshot()
    report_up_to(tip() + 2, interest)
    stage.run_executions()
    before, results = tip(), stage.delivered(user)
    for process in stage.data.current.processes:
        process.pause()
    server.stop()
    server.start(snapshot)
    report_up_to(before + 1, unwanted)
    for process in stage.data.current.processes:
        process.resume()
    stage.wait("the data cluster finds that the server was restored", lambda: audit.skipped == 1)
    stage.run(AT_ONCE_S)
    stage.report(interest)
    stage.run_executions()
    stage.expect_results(user, results + 1)


# The data cluster.


def _append_under_way(stage: DataStage) -> QueryUser:
    """Return U, whose result set the data cluster has just appended; it does not know that yet."""
    user = stage.query_user("U", ALERTS_A)
    stage.report(ALERTS_A)
    stage.wait_appending(stage.data.current)
    return user


def dies_after_appending(stage: DataStage) -> None:
    """The data cluster dies when it has appended a result set; it appends it again, and U gets it once."""
    user = _append_under_way(stage)
    stage.run(0.001)
    stage.data.current.kill()
    stage.start_data_cluster(stage.data.current)
    stage.run_executions()
    stage.expect_results(user, 1)


def loses_its_disk_after_appending(stage: DataStage) -> None:
    """The same, and the next data cluster has another disk, and more records: the window is the same."""
    user = _append_under_way(stage)
    stage.run(0.001)
    stage.data.current.kill()
    stage.report(ALERTS_A)
    stage.data.current = stage.data.data_clusters[1]
    stage.start_data_cluster(stage.data.current)
    stage.run_executions()
    stage.expect_results(user, 2)


def hangs_while_appending(stage: DataStage) -> None:
    """A data cluster hangs before it appends, another one takes over, and the first one goes on: it is refused."""
    former, user = stage.data.current, _append_under_way(stage)
    former.pause(1.0)
    with stage.held(former.name, stage.log_of(ALERTS_A).id, to_server=True):
        stage.data.current = stage.data.data_clusters[1]
        stage.start_data_cluster(stage.data.current)
        stage.run_executions()
        stage.report(ALERTS_A)
        stage.run_executions()
    stage.wait("the former data cluster ends", lambda: not former.is_running)
    stage.expect_results(user, 2)


def appends_when_an_interest_is_new(stage: DataStage) -> None:
    """A former data cluster appends to a log that has ended and begun again: it is refused, and W gets nothing old."""
    stage.query_user("V", ALERTS_B)
    former, user = stage.data.current, _append_under_way(stage)
    for process in former.processes:
        process.pause()
    with stage.held(former.name, stage.log_of(ALERTS_A).id, to_server=True):
        stage.data.current = stage.data.data_clusters[1]
        stage.start_data_cluster(stage.data.current)
        stage.run_executions()
        stage.expect_results(user, 1)
        user.leave(ALERTS_A)
        stage.run(SHORT_BROKER_OPTIONS.linger_s + 2 * KEEP_S)
        newcomer = stage.query_user("W", ALERTS_A)
    stage.run(AT_ONCE_S)
    stage.expect_results(newcomer, 0)
    for process in former.processes:
        process.resume()
    stage.wait("the former data cluster ends", lambda: not former.is_running)


def goes_on_with_the_same_folder(stage: DataStage) -> None:
    """A data cluster hangs when it has nearly sealed a window, and one with the same folder takes over.

    The window of the newer one is longer. In the middle of its execution, the former one goes on: it changes no window.
    """
    former, newer = stage.data.data_clusters
    newer.folders = former.folders
    user = stage.query_user("U", ALERTS_A)
    stage.report(ALERTS_A)
    stage.run_executions()
    # It does not ask for the time for this reason, too, until the window is sealed.
    stage.wait_asked(former, "which interests end", lambda words: words[1:2] == (INTERESTS_END,), max(stage.edge.logs))
    stage.report(ALERTS_A)
    stage.wait_end_asked(former, ALERTS)
    stage.wait_asked(former, "the time", lambda command: command == (b"TIME",), max(stage.edge.logs))
    for process in former.processes:
        process.pause()
    stage.report(ALERTS_A)
    stage.data.current = newer
    stage.start_data_cluster(newer)
    stage.wait_appending(newer)
    with stage.held(newer.name, stage.log_of(ALERTS_A).id, to_server=True):
        for process in former.processes:
            process.resume()
        stage.wait("the former data cluster ends", lambda: not former.is_running)
    stage.run_executions()
    stage.expect_results(user, 2)


def writes_to_the_checkpoint_of_its_successor(stage: DataStage) -> None:
    """A data cluster hangs when it has stored a window, and one with the same folder takes over.

    When the former one goes on, it writes the window to the new checkpoint, as the end of the next one.
    """
    former, newer = stage.data.data_clusters
    newer.folders = former.folders
    user = stage.query_user("U", ALERTS_A)
    for _ in range(2):
        stage.report(ALERTS_A)
        stage.run_executions()
    stage.report(ALERTS_A)
    stage.wait_asked(former, "to store a window", lambda words: words[1:2] == (PROGRESS_SCRIPT,), max(stage.edge.logs))
    for process in former.processes:
        process.pause()
    stage.data.current = newer
    stage.start_data_cluster(newer)
    stage.run_executions()
    stage.report(ALERTS_A)
    stage.run_executions()
    for process in former.processes:
        process.resume()
    stage.wait("the former data cluster ends", lambda: not former.is_running)
    newer.kill()
    stage.start_data_cluster(newer)
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.expect_results(user, 5)


def two_begin_at_once(stage: DataStage) -> None:
    """Two data clusters claim the same term: one of them gets it, the other one a larger one, and one goes on."""
    user = stage.query_user("U", ALERTS_A)
    first, second = stage.data.data_clusters
    first.kill()
    second.start()
    stage.wait_asked(second, "for a term", lambda command: command[1:2] == (CLAIM_SCRIPT,))
    with stage.held(second.name, min(stage.edge.logs), to_server=True):
        stage.start_data_cluster(first)
        stage.data.current = second
    stage.wait("one of them ends", lambda: not first.is_running)
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.expect_results(user, 1)


def comes_back_with_an_old_disk(stage: DataStage) -> None:
    """A data cluster comes back that knows little of what another one has executed meanwhile."""
    former, user = stage.data.current, stage.query_user("U", ALERTS_A)
    stage.report(ALERTS_A)
    stage.run_executions()
    former.kill()
    stage.data.current = stage.data.data_clusters[1]
    stage.start_data_cluster(stage.data.current)
    for _ in range(2):
        stage.report(ALERTS_A)
        stage.run_executions()
    stage.data.current.kill()
    stage.data.current = former
    stage.start_data_cluster(former)
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.expect_results(user, 4)


# Queries that are dropped.


def is_dropped(stage: DataStage) -> None:
    """A query is dropped, and registered again: U knows, and gets what is reported from then on."""
    user = stage.query_user("U", ALERTS_A)
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.data.drop("alerts_of")
    stage.run(2 * LOOK_S)
    stage.report(ALERTS_A)
    stage.wait("U knows", lambda: stage.delivered(user) == 2)
    stage.data.current.kill()
    stage.data.register_again("alerts_of")
    stage.report(ALERTS_A)
    stage.start_data_cluster(stage.data.current)
    stage.run_executions()
    stage.expect_results(user, 3)


def is_dropped_twice(stage: DataStage) -> None:
    """A query is dropped, registered again, and dropped before any execution: U knows of both."""
    user = stage.query_user("U", ALERTS_A)
    stage.data.drop("alerts_of")
    stage.wait("U knows", lambda: stage.delivered(user) == 1)
    stage.data.register_again("alerts_of")
    stage.run(2 * LOOK_S)
    stage.data.drop("alerts_of")
    stage.wait("U knows of the second time", lambda: stage.delivered(user) == 2)
    stage.data.register_again("alerts_of")
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.expect_results(user, 3)


def is_registered_while_it_ends(stage: DataStage) -> None:
    """The data cluster dies when two of three users know that a query was dropped, and it is registered again.

    The third one gets to know it, too, and none of them misses a result set behind it.
    """
    interests = [query_interest("alerts_of", {"type": type_}) for type_ in TYPES]
    assert len(interests) > APPENDS_PER_COMMAND, "one command does not publish all"
    users = [stage.query_user(f"U{number}", interest) for number, interest in enumerate(interests)]
    stage.data.drop("alerts_of")
    stage.wait_appending(stage.data.current)
    stage.run(0.001)
    stage.data.current.kill()
    stage.data.register_again("alerts_of")
    stage.start_data_cluster(stage.data.current)
    for interest in interests:
        stage.report(interest)
    stage.run_executions()
    for user in users:
        stage.expect_results(user, 2)


def subscribes_while_brokers_believe(stage: DataStage) -> None:
    """U subscribes at a broker that does not know yet that the query was dropped: U knows, too."""
    stage.query_user("V", ALERTS_B)
    stage.data.drop("alerts_of")
    stage.run(1.2 * LOOK_S)
    user = stage.query_user("U", ALERTS_A)
    stage.wait("U knows", lambda: stage.delivered(user) == 1)
    stage.data.register_again("alerts_of")
    stage.report(ALERTS_A)
    stage.run_executions()
    stage.expect_results(user, 2)


DATA_SCENARIOS: dict[str, DataScenario] = {
    "data-appends-when-an-interest-is-new": DataScenario(appends_when_an_interest_is_new, edge=data_edge()),
    "data-answer-is-lost": DataScenario(answer_is_lost, edge=data_edge(), losses_allowed=True),
    "data-comes-back-with-an-old-disk": DataScenario(comes_back_with_an_old_disk, edge=data_edge()),
    "data-comes-back-late": DataScenario(comes_back_late, edge=data_edge(), losses_allowed=True),
    "data-definition-is-elsewhere": DataScenario(
        definition_is_elsewhere, edge=data_edge(logs_may_fail=True), data=LOSES, losses_allowed=True
    ),
    "data-dies-after-appending": DataScenario(dies_after_appending, edge=data_edge()),
    "data-durable-server-is-restored": DataScenario(
        durable_server_is_restored, edge=data_edge(logs_are_durable=True), data=LOSES, losses_allowed=True
    ),
    "data-goes-on-with-the-same-folder": DataScenario(goes_on_with_the_same_folder, edge=data_edge()),
    "data-hangs-while-appending": DataScenario(hangs_while_appending, edge=data_edge()),
    "data-is-dropped": DataScenario(is_dropped, edge=data_edge(broker=QUICK_TO_LEARN)),
    "data-is-dropped-twice": DataScenario(is_dropped_twice, edge=data_edge(broker=QUICK_TO_LEARN)),
    "data-is-registered-while-it-ends": DataScenario(
        is_registered_while_it_ends, edge=data_edge(broker=QUICK_TO_LEARN)
    ),
    "data-keys-are-deleted-without-users": DataScenario(
        keys_are_deleted_without_users, edge=data_edge(logs_may_fail=True), data=LOSES, losses_allowed=True
    ),
    "data-log-server-loses-interests": DataScenario(
        log_server_loses_interests, edge=data_edge(logs_may_fail=True), data=LOSES, losses_allowed=True
    ),
    "data-log-server-loses-interests-without-users": DataScenario(
        log_server_loses_interests_without_users, edge=data_edge(logs_may_fail=True), data=LOSES, losses_allowed=True
    ),
    "data-loses-its-disk-after-appending": DataScenario(loses_its_disk_after_appending, edge=data_edge()),
    "data-record-is-lost": DataScenario(record_is_lost, edge=data_edge(), losses_allowed=True),
    "data-registered-before-confirmed": DataScenario(registered_before_confirmed, edge=data_edge()),
    "data-registered-in-a-window": DataScenario(registered_in_a_window, edge=data_edge()),
    "data-keys-are-deleted-twice": DataScenario(
        keys_are_deleted_twice, edge=data_edge(logs_may_fail=True), data=LOSES, losses_allowed=True
    ),
    "data-subscribes-while-brokers-believe": DataScenario(
        subscribes_while_brokers_believe, edge=data_edge(broker=QUICK_TO_LEARN)
    ),
    "data-stays-registered": DataScenario(stays_registered, edge=data_edge()),
    "data-writes-to-the-checkpoint-of-its-successor": DataScenario(
        writes_to_the_checkpoint_of_its_successor, edge=data_edge()
    ),
    "data-two-begin-at-once": DataScenario(two_begin_at_once, edge=data_edge()),
}
"""Every scenario by its name."""
