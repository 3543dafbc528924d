"""Queries and datasets in the machine of a broker: what waits for what, and what a failure does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, entry_of
from dynamoth.data.datasets import Dataset, Field
from dynamoth.data.queries import Parameter, StandingQuery
from dynamoth.data.records import APPEND_SCRIPT
from dynamoth.data.registrations import REGISTER_SCRIPT
from dynamoth.edge.frames import (
    Connect,
    Error,
    MovedIn,
    Published,
    PublishRequest,
    Subscribe,
    Subscribed,
    SubscriptionRequest,
    Unsubscribe,
)
from dynamoth.edge.interests import channel_interest, query_interest
from dynamoth.edge.log import FENCED
from dynamoth.edge.publications import LoggedPublication, Position, pack_publication
from dynamoth.machine.events import ErrorReply, LinkDown, Replied, Send
from dynamoth_broker.definitions import UNKNOWN_MAX
from dynamoth_broker.events import (
    ChannelConfirmed,
    Closed,
    Grant,
    Opened,
    Publications,
    RecordsAnswered,
    RecordsPosted,
    SubscribeChannel,
)
from tests.broker.test_machine import EPOCH, LOG, NO_PINGS, Broker, frames, offsets, reads
from tests.machines.helpers import only

OPTIONS = replace(NO_PINGS, has_data_cluster=True)
ANN = Grant("ann", publish=("*",))
NEAR = StandingQuery(
    "near", "...", "reports", 10, (Parameter("user", "string"),), keep_s=100.0, bind=(("user", "$sub"),)
)
REPORTS = Dataset("reports", "append", (Field("id", "string"), Field("n", "int")), partitions=1, id="id")
INTEREST = query_interest("near", {"user": "ann"})
REQUEST = SubscriptionRequest(1, INTEREST, None)
D = channel_interest("d:reports")


def asked(actions: list[Any], key: bytes) -> list[Send]:
    return [send for send in reads(actions) if send.args[:2] == (b"HMGET", key)]


def scripts(actions: list[Any], script: bytes) -> list[Send]:
    return [send for send in reads(actions) if send.args[1] == script]


def defined(broker: Broker, ask: Send, definition: Dataset | StandingQuery | None) -> list[Any]:
    """Let the log server answer with a definition."""
    value = None
    if definition is not None:
        entry = entry_of(definition)
        value = b"%d %s" % (entry.version, json.dumps(entry.definition).encode())
    return broker.tell(Replied(LOG, ask.tag, [value]))


def joining(request: SubscriptionRequest = REQUEST, connection: int = 1) -> tuple[Broker, Send]:
    """Return a broker whose user waits for the registration of a query, and the command that registers it."""
    broker = Broker(OPTIONS)
    actions = broker.open(connection, request, grant=ANN)
    [ask] = asked(actions, QUERIES_KEY)
    [register] = scripts(defined(broker, ask, NEAR), REGISTER_SCRIPT)
    return broker, register


def opened(broker: Broker, tip: int = 5) -> list[Any]:
    """Confirm the channel, and answer the read of the log's end."""
    [read] = reads(broker.tell(ChannelConfirmed(INTEREST.log_channel)))
    return broker.page(read, tip)


@pytest.mark.parametrize("registered_last", [False, True])
def test_a_user_is_confirmed_when_the_interest_is_registered_and_the_log_is_open(registered_last: bool) -> None:
    broker, register = joining()
    steps = [lambda: opened(broker), lambda: broker.tell(Replied(LOG, register.tag, 1))]
    first, second = reversed(steps) if not registered_last else steps
    assert frames(first(), 1) == []
    assert frames(second(), 1) == [Subscribed(1, INTEREST.id, Position(EPOCH, 5)), MovedIn()]


def test_the_channel_is_joined_while_the_interest_is_registered() -> None:
    broker = Broker(OPTIONS)
    assert only(SubscribeChannel, broker.open(1, REQUEST, grant=ANN)) == [SubscribeChannel(INTEREST.log_channel)]


def test_who_has_no_token_has_no_subject() -> None:
    broker = Broker(OPTIONS)
    nobody = SubscriptionRequest(1, query_interest("near", {"user": ""}), None)
    [ask] = asked(broker.open(1, nobody, grant=Grant()), QUERIES_KEY)
    [refusal, _] = frames(defined(broker, ask, NEAR), 1)
    assert isinstance(refusal, Error)
    assert (refusal.code, refusal.ref) == ("forbidden", 1)


def test_users_of_one_interest_share_a_registration() -> None:
    broker, register = joining()
    opened(broker)
    actions = broker.open(2, REQUEST, grant=ANN)
    assert scripts(actions, REGISTER_SCRIPT) != [], "it has not been answered yet: it is safe to repeat"
    done = broker.tell(Replied(LOG, register.tag, 1))
    assert [type(each) for each in (*frames(done, 1), *frames(done, 2))] == [Subscribed, MovedIn] * 2
    later = broker.open(3, REQUEST, grant=ANN)
    assert scripts(later, REGISTER_SCRIPT) == []
    assert [type(each) for each in frames(later, 3)[-2:]] == [Subscribed, MovedIn]


@pytest.mark.parametrize("reply", [ErrorReply("OOM"), "down", "late"])
def test_a_registration_that_fails_refuses_for_now(reply: Any) -> None:
    broker, register = joining()
    opened(broker)
    if reply == "down":
        actions = broker.tell(LinkDown(LOG, "lost"))
    elif reply == "late":
        actions = broker.pass_time(OPTIONS.log_wait_s)
    else:
        actions = broker.tell(Replied(LOG, register.tag, reply))
    [refusal, _] = frames(actions, 1)
    assert isinstance(refusal, Error)
    assert (refusal.code, refusal.retry) == ("log_unavailable", "later")


def test_without_a_log_server_nobody_says_that_a_query_is_unknown() -> None:
    broker = Broker(OPTIONS)
    broker.tell(LinkDown(LOG, "lost"))
    [refusal] = only(Error, frames(broker.open(1, REQUEST, grant=ANN), 1))
    assert (refusal.code, refusal.retry) == ("log_unavailable", "later")


def test_an_unknown_query_is_asked_for_again_when_what_is_known_is_old() -> None:
    broker = Broker(OPTIONS)
    [ask] = asked(broker.open(1, REQUEST, grant=ANN), QUERIES_KEY)
    [refusal, _] = frames(defined(broker, ask, None), 1)
    assert (refusal.code, refusal.retry) == ("unknown_query", "never")
    assert asked(broker.open(2, REQUEST, grant=ANN), QUERIES_KEY) == []
    broker.pass_time(OPTIONS.believed_s)
    assert asked(broker.open(3, REQUEST, grant=ANN), QUERIES_KEY) != []


@pytest.mark.parametrize("value", [b'1 {"kind":"append","new":1}', b"1 {broken", b"?", 7])
def test_a_definition_that_cannot_be_read_is_not_unknown(value: Any) -> None:
    """It may be of a newer version: a user who does not send a record again would lose it."""
    broker = Broker(OPTIONS)
    broker.open(1, grant=ANN)
    [ask] = asked(publish(broker, 7, {"id": "a", "n": 0}), DATASETS_KEY)
    [refusal] = frames(broker.tell(Replied(LOG, ask.tag, [value])), 1)
    assert (refusal.code, refusal.retry) == ("log_unavailable", "later")
    [ask] = asked(broker.open(2, REQUEST, grant=ANN), QUERIES_KEY)
    [refusal, _] = frames(broker.tell(Replied(LOG, ask.tag, [value])), 2)
    assert (refusal.code, refusal.retry) == ("log_unavailable", "later")


def test_a_query_that_one_server_does_not_have_is_unknown_only_if_all_servers_say_so() -> None:
    """A server that has lost its data knows nothing; the one that is away may know the query."""
    broker = Broker(replace(OPTIONS, logs={"l1": "redis://l1:6379", "l2": "redis://l2:6379"}))
    [ask] = asked(broker.open(1, REQUEST, grant=ANN), QUERIES_KEY)
    [refusal, _] = frames(defined(broker, ask, None), 1)
    assert (refusal.code, refusal.retry) == ("log_unavailable", "later")
    broker.up("log:l2")
    again = asked(broker.open(2, REQUEST, grant=ANN), QUERIES_KEY)
    assert [send.link for send in again] == [LOG, "log:l2"]
    assert frames(defined(broker, again[0], None), 2) == []
    [refusal, _] = frames(broker.tell(Replied("log:l2", again[1].tag, [None])), 2)
    assert (refusal.code, refusal.retry) == ("unknown_query", "never")


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_definition_that_all_servers_have_lost_is_not_believed_any_more(is_restored: bool) -> None:
    broker = Broker(OPTIONS)
    [ask] = asked(broker.open(1, REQUEST, grant=ANN), QUERIES_KEY)
    defined(broker, ask, replace(NEAR, version=3))
    broker.pass_time(OPTIONS.believed_s)
    [ask] = asked(broker.open(2, REQUEST, grant=ANN), QUERIES_KEY)
    older = replace(NEAR, version=2, parameters=(Parameter("name", "string"),), bind=()) if is_restored else None
    [refusal, _] = frames(defined(broker, ask, older), 2)
    assert isinstance(refusal, Error)
    assert refusal.code == ("bad_params" if is_restored else "unknown_query")


def test_a_known_query_is_served_while_a_server_is_away() -> None:
    broker = Broker(replace(OPTIONS, logs={"l1": "redis://l1:6379", "l2": "redis://l2:6379"}))
    [ask] = asked(broker.open(1, REQUEST, grant=ANN), QUERIES_KEY)
    defined(broker, ask, NEAR)
    broker.pass_time(OPTIONS.believed_s)
    [ask] = asked(broker.open(2, REQUEST, grant=ANN), QUERIES_KEY)
    assert not any(isinstance(frame, Error) for frame in frames(defined(broker, ask, None), 2))


def test_an_interest_is_renewed_while_it_has_users() -> None:
    broker, register = joining()
    opened(broker)
    broker.tell(Replied(LOG, register.tag, 1))
    renewals = scripts(broker.pass_time(NEAR.keep_s / 4 + 1), REGISTER_SCRIPT)
    assert [INTEREST.id.encode() in send.args for send in renewals[:1]] == [True]
    broker.tell(Replied(LOG, renewals[-1].tag, 0))
    broker.tell(Closed(1))
    assert scripts(broker.pass_time(NEAR.keep_s), REGISTER_SCRIPT) == []


def test_a_renewal_that_fails_is_repeated() -> None:
    broker, register = joining()
    opened(broker)
    broker.tell(Replied(LOG, register.tag, 1))
    [first, *_] = scripts(broker.pass_time(NEAR.keep_s / 4 + 1), REGISTER_SCRIPT)
    broker.tell(Replied(LOG, first.tag, ErrorReply("OOM")))
    assert scripts(broker.pass_time(2.5), REGISTER_SCRIPT) != []


def test_a_log_server_that_comes_back_gets_its_registrations_again() -> None:
    """It may have lost them: without them, nothing is executed for its interests, and nobody would know."""
    broker, register = joining()
    opened(broker)
    broker.tell(Replied(LOG, register.tag, 1))
    broker.tell(LinkDown(LOG, "restarts"))
    [again] = scripts(broker.up(LOG, "another run"), REGISTER_SCRIPT)
    assert INTEREST.id.encode() in again.args


def test_an_interest_without_users_is_registered_again_when_its_log_server_has_come_back() -> None:
    """The server may have lost it, and the next user must not be confirmed before it is registered."""
    broker, register = joining()
    opened(broker)
    broker.tell(Replied(LOG, register.tag, 1))
    broker.tell(Closed(1))
    broker.tell(LinkDown(LOG, "restarts"))
    assert scripts(broker.up(LOG, "another run"), REGISTER_SCRIPT) == []
    actions = broker.open(2, REQUEST, grant=ANN)
    [again] = scripts(actions, REGISTER_SCRIPT)
    assert only(Subscribed, frames(actions, 2)) == []
    confirmed = broker.tell(Replied(LOG, again.tag, 1))
    assert [type(each) for each in frames(confirmed, 2)] == [Subscribed, MovedIn]


def test_the_first_user_of_an_interest_waits_until_it_is_registered_again() -> None:
    """While it had no users here, nobody would have noticed that its server has lost it."""
    broker, register = joining()
    opened(broker)
    broker.tell(Replied(LOG, register.tag, 1))
    broker.tell(Closed(1))
    actions = broker.open(2, REQUEST, grant=ANN)
    [again] = scripts(actions, REGISTER_SCRIPT)
    assert only(Subscribed, frames(actions, 2)) == []
    assert only(Subscribed, frames(broker.open(3, REQUEST, grant=ANN), 3)) == []
    confirmed = broker.tell(Replied(LOG, again.tag, 0))
    assert [type(each) for each in (*frames(confirmed, 2), *frames(confirmed, 3))] == [Subscribed, MovedIn] * 2


def test_nobody_is_confirmed_until_a_log_server_that_has_come_back_has_registered_an_interest_again() -> None:
    broker, register = joining()
    opened(broker)
    broker.tell(Replied(LOG, register.tag, 1))
    broker.tell(LinkDown(LOG, "restarts"))
    [first] = scripts(broker.up(LOG, "another run"), REGISTER_SCRIPT)
    assert only(Subscribed, frames(broker.open(2, REQUEST, grant=ANN), 2)) == []
    confirmed = broker.tell(Replied(LOG, first.tag, 1))
    assert [type(each) for each in frames(confirmed, 2)] == [Subscribed, MovedIn]


def test_an_interest_whose_log_was_lost_is_registered_again() -> None:
    """All keys of its server were deleted (FLUSHALL): the connection stays, and the log begins again."""
    broker, register = joining()
    opened(broker, tip=0)
    broker.tell(Replied(LOG, register.tag, 1))
    notice = pack_publication(LoggedPublication(EPOCH + 1, 1, None))
    [read] = reads(broker.tell(Publications([(INTEREST.log_channel, notice)])))
    actions = broker.page(read, 1, 1, epoch=EPOCH + 1)
    [again] = scripts(actions, REGISTER_SCRIPT)
    assert INTEREST.id.encode() in again.args


def test_a_notice_has_the_log_read_once_for_all() -> None:
    broker, register = joining()
    opened(broker, tip=0)
    broker.tell(Replied(LOG, register.tag, 1))
    broker.open(2, REQUEST, grant=ANN)
    notice = pack_publication(LoggedPublication(EPOCH, 1, None))
    [read] = reads(broker.tell(Publications([(INTEREST.log_channel, notice)])))
    assert reads(broker.tell(Publications([(INTEREST.log_channel, notice)]))) == [], "it is being read"
    actions = broker.page(read, 1, 1)
    assert offsets(actions, 1) == offsets(actions, 2) == [1]
    [again] = reads(actions)  # a notice came during the read, which may not have seen its publication
    assert offsets(broker.page(again, 1), 1) == []
    assert reads(broker.tell(Publications([(INTEREST.log_channel, notice)]))) == [], "it is known"


def test_a_notice_before_the_log_is_open_is_no_loss() -> None:
    broker, register = joining()
    broker.tell(Replied(LOG, register.tag, 1))
    [tip] = reads(broker.tell(ChannelConfirmed(INTEREST.log_channel)))
    broker.tell(Publications([(INTEREST.log_channel, pack_publication(LoggedPublication(EPOCH, 6, None)))]))
    [read] = reads(broker.page(tip, 5))
    assert offsets(broker.page(read, 6, 6), 1) == [6]


# Records.


def publish(broker: Broker, ref: int, record: Any, connection: int = 1) -> list[Any]:
    return broker.frame(connection, PublishRequest(ref, D, json.dumps(record).encode()))


def publishing() -> Broker:
    """Return a broker that knows the dataset."""
    broker = Broker(OPTIONS)
    broker.open(1, grant=ANN)
    [ask] = asked(publish(broker, 0, {"id": "a", "n": 0}), DATASETS_KEY)
    [append] = scripts(defined(broker, ask, REPORTS), APPEND_SCRIPT)
    assert frames(broker.tell(Replied(LOG, append.tag, [1 << 40])), 1) == [Published(0)]
    return broker


@pytest.mark.parametrize(
    ("reply", "code", "retry"),
    [
        ([5], None, None),
        ([0], None, None),
        (ErrorReply("FULL: 9 records wait for the archive"), "dataset_full", "later"),
        (ErrorReply("ERR FULL: 9 records wait"), "dataset_full", "later"),
        (ErrorReply("OOM command not allowed"), "log_unavailable", "later"),
        (b"?", "unknown_outcome", "later"),
        ([], "unknown_outcome", "later"),
        ([9, 10], "unknown_outcome", "later"),
    ],
)
def test_what_the_log_server_says_of_a_record(reply: Any, code: str | None, retry: str | None) -> None:
    broker = publishing()
    [append] = scripts(publish(broker, 7, {"id": "b", "n": 1}), APPEND_SCRIPT)
    [answer] = frames(broker.tell(Replied(LOG, append.tag, reply)), 1)
    if code is None:
        assert answer == Published(7)
    else:
        assert (answer.code, answer.retry, answer.ref) == (code, retry, 7)


def test_a_record_without_an_answer_may_be_stored() -> None:
    broker = publishing()
    publish(broker, 7, {"id": "b", "n": 1})
    [answer] = frames(broker.tell(LinkDown(LOG, "lost")), 1)
    assert (answer.code, answer.retry) == ("unknown_outcome", "later")
    [refusal] = frames(publish(broker, 8, {"id": "c", "n": 1}), 1)
    assert (refusal.code, refusal.retry) == ("log_unavailable", "later")
    assert refusal.message == "the log server of this record does not answer: nothing is stored"
    counters = broker.broker.counters
    assert (counters["records_unknown_outcome"], counters["records_log_unavailable"]) == (1, 1)
    broker.now += OPTIONS.believed_s
    [refusal] = frames(publish(broker, 9, {"id": "d", "n": 1}), 1)
    assert (refusal.code, counters["records_log_unavailable"]) == ("log_unavailable", 2), "nobody knows the dataset"


def test_a_log_server_without_memory_is_named_with_the_cure() -> None:
    broker = publishing()
    [append] = scripts(publish(broker, 7, {"id": "b", "n": 1}), APPEND_SCRIPT)
    reply = ErrorReply("OOM command not allowed when used memory > 'maxmemory'. script: 4f, on @user_script:4.")
    [answer] = frames(broker.tell(Replied(LOG, append.tag, reply)), 1)
    said = "OOM command not allowed when used memory > 'maxmemory'."
    words = f"log server l1: {said} (raise maxmemory, or make room there); nothing is stored"
    assert (answer.code, answer.retry, answer.message) == ("log_unavailable", "later", words)


@pytest.mark.parametrize(("reply", "lost"), [([9], 0), (ErrorReply("OOM"), 1), ("down", 1), ("was down", 1)])
def test_a_dead_letter_that_is_not_stored_is_counted(reply: Any, lost: int) -> None:
    broker = publishing()
    if reply == "was down":
        broker.tell(LinkDown(LOG, "lost"))
    actions = publish(broker, 7, {"id": "b", "n": "no number"})
    [answer] = frames(actions, 1)
    assert (answer.code, answer.retry) == ("bad_record", "never")
    if reply == "down":
        broker.tell(LinkDown(LOG, "lost"))
    elif reply != "was down":
        [letter] = scripts(actions, APPEND_SCRIPT)
        broker.tell(Replied(LOG, letter.tag, reply))
    assert broker.broker.counters["dead_letters_lost"] == lost


def test_records_of_one_request_are_one_command_and_answered_together() -> None:
    broker = publishing()
    records = [b'{"id": "x", "n": 1}', b"bad", b'{"id": "y", "n": 2}']
    actions = broker.tell(RecordsPosted("request", "reports", records, ANN))
    letters, append = scripts(actions, APPEND_SCRIPT)
    if len(letters.args) > len(append.args):
        letters, append = append, letters
    assert only(RecordsAnswered, actions) == []
    assert only(RecordsAnswered, broker.tell(Replied(LOG, letters.tag, [3]))) == []
    [answer] = only(RecordsAnswered, broker.tell(Replied(LOG, append.tag, [8, 0])))
    assert [code for code, _ in answer.outcomes] == ["stored", "bad_record", "duplicate"]


def test_a_fence_of_logs_is_no_matter_of_records() -> None:
    broker = publishing()
    [append] = scripts(publish(broker, 7, {"id": "b", "n": 1}), APPEND_SCRIPT)
    [answer] = frames(broker.tell(Replied(LOG, append.tag, ErrorReply(FENCED))), 1)
    assert answer.code == "log_unavailable"


def test_nobody_publishes_dead_letters() -> None:
    """They say which user has sent what: a user who could write them could blame others."""
    broker = publishing()
    letter = {"reason": "forged", "source": "user bob", "record": "x", "at": 0}
    actions = broker.frame(1, PublishRequest(7, channel_interest("d:reports_dead"), json.dumps(letter).encode()))
    [refusal] = frames(actions, 1)
    assert (refusal.code, refusal.retry) == ("unknown_dataset", "never")
    assert reads(actions) == []
    posted = broker.tell(RecordsPosted("request", "reports_dead", [json.dumps(letter).encode(), b"malformed"], ANN))
    [answer] = only(RecordsAnswered, posted)
    assert [code for code, _ in answer.outcomes] == ["unknown_dataset"] * 2
    assert reads(posted) == []


@pytest.mark.parametrize("name", ["x" * 49, "Reports", "reports\n", "é"])
def test_a_name_that_no_definition_can_have_is_unknown_without_a_question(name: str) -> None:
    broker = publishing()
    actions = broker.tell(RecordsPosted("request", name, [b"{}"], ANN))
    [answer] = only(RecordsAnswered, actions)
    assert (answer.outcomes[0][0], reads(actions)) == ("unknown_dataset", [])
    actions = broker.open(2, SubscriptionRequest(1, query_interest(name, {}), None), grant=ANN)
    assert only(Error, frames(actions, 2))[0].code == "unknown_query"
    assert asked(actions, QUERIES_KEY) == []


def test_a_broker_remembers_a_bounded_number_of_unknown_names() -> None:
    broker = publishing()

    def ask(name: str) -> list[Send]:
        return asked(broker.tell(RecordsPosted("request", name, [b"{}"], ANN)), DATASETS_KEY)

    for number in range(UNKNOWN_MAX + 1):
        [question] = ask(f"n{number}")
        defined(broker, question, None)
    assert ask(f"n{UNKNOWN_MAX}") == [], "it is remembered"
    assert ask("reports") == [], "one with a definition is not forgotten"
    [question] = ask("n0")
    defined(broker, question, None)
    assert ask("n0") == [] and len(ask("n1")) == 1, "the oldest is forgotten"
    records = broker.broker.records
    assert records is not None
    assert records.definitions.size <= UNKNOWN_MAX + 2


def test_a_name_that_is_asked_for_again_is_not_forgotten_meanwhile() -> None:
    broker = publishing()
    posted = RecordsPosted("request", "later", [b'{"id": "a", "n": 1}'], ANN)
    [question] = asked(broker.tell(posted), DATASETS_KEY)
    defined(broker, question, None)
    broker.pass_time(OPTIONS.believed_s)
    [again] = asked(broker.tell(posted), DATASETS_KEY)
    for number in range(UNKNOWN_MAX + 1):
        [question] = asked(broker.tell(RecordsPosted("other", f"n{number}", [b"{}"], ANN)), DATASETS_KEY)
        defined(broker, question, None)
    assert scripts(defined(broker, again, replace(REPORTS, name="later")), APPEND_SCRIPT) != []
    assert asked(broker.tell(posted), DATASETS_KEY) == [], "its definition is known"


# Bounds.


def subscribe_to(broker: Broker, user: str, ref: int, connection: int = 1) -> list[Any]:
    """Subscribe to a query with parameters of this user's own; its interest is registered at once."""
    interest = query_interest("every", {"area": ref})
    actions = broker.frame(connection, Subscribe(SubscriptionRequest(ref, interest, None)))
    for ask in asked(actions, QUERIES_KEY):
        actions += defined(broker, ask, EVERY)
    for register in scripts(actions, REGISTER_SCRIPT):
        broker.tell(Replied(LOG, register.tag, 1))
    return actions


EVERY = replace(NEAR, name="every", parameters=(Parameter("area", "int"),), bind=())


@pytest.mark.parametrize("grant", [ANN, Grant()])
def test_a_user_who_has_ever_other_interests_registered_is_slowed_down(grant: Grant) -> None:
    """Each of them is executed until its time is over, though nobody has it."""
    broker = Broker(replace(OPTIONS, new_interests_per_hour_max=3))
    broker.tell(Opened(1, Connect("one"), grant, "10.0.0.1"))
    for ref in range(3):
        assert scripts(subscribe_to(broker, "ann", ref), REGISTER_SCRIPT) != []
        broker.frame(1, Unsubscribe(query_interest("every", {"area": ref}).id))
    refused = subscribe_to(broker, "ann", 3)
    assert scripts(refused, REGISTER_SCRIPT) == []
    [error] = only(Error, frames(refused, 1))
    assert (error.code, error.retry, error.retry_after_ms, error.ref) == ("too_many_interests", "later", 1_200_000, 3)
    assert broker.broker.counters["interests_refused"] == 1
    assert scripts(subscribe_to(broker, "ann", 2), REGISTER_SCRIPT) != [], "this one is registered already"
    broker.tell(Opened(2, Connect("two"), replace(grant, user=grant.user and "bob"), "10.0.0.2"))
    assert scripts(subscribe_to(broker, "bob", 4, connection=2), REGISTER_SCRIPT) != [], "another user"
    broker.tell(Opened(3, Connect("three"), grant, "10.0.0.1"))
    assert only(Error, frames(subscribe_to(broker, "ann", 5, connection=3), 3)) != [], "another session of the user"
    broker.pass_time(1200.0)
    assert scripts(subscribe_to(broker, "ann", 3), REGISTER_SCRIPT) != []
