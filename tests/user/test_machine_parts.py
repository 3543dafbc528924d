"""What the parts of the client's machine decide, in virtual time."""

from __future__ import annotations

from dynamoth.edge.frames import Connected, Error, Move, MovedIn, Pong, PublishRequest, Refresh, Subscribed
from dynamoth.edge.interests import channel_interest
from dynamoth.machine.events import Start, Tick
from dynamoth_user.machine.events import (
    AddSubscription,
    Close,
    CloseConnection,
    Complained,
    ConnectionClosed,
    ConnectionOpened,
    Failed,
    ForgetPublication,
    FrameReceived,
    Interrupted,
    NeedToken,
    OpenConnection,
    PublishEnded,
    PublishMessage,
    ReadingPaused,
    RemoveSubscription,
    SendFrame,
    Served,
    TokenReady,
    UserAction,
    UserEvent,
    UserOptions,
)
from dynamoth_user.machine.machine import UserMachine

NEWS = channel_interest("news")


class Machine:
    """A machine with its clock."""

    def __init__(self, *urls: str, has_token: bool = False, has_fixed_token: bool = False, unsent_max: int = 2) -> None:
        options = UserOptions(
            urls=urls or ("a",),
            session="me",
            has_token=has_token,
            has_fixed_token=has_fixed_token,
            unsent_max=unsent_max,
        )
        self.machine = UserMachine(options, 1)
        self.now = 0.0
        self.opened: list[OpenConnection] = []
        self.handle(Start())

    def handle(self, *events: UserEvent) -> list[UserAction]:
        actions: list[UserAction] = []
        for event in events:
            actions += self.machine.handle(event, self.now)
            self.machine.check()
        self.opened += [each for each in actions if isinstance(each, OpenConnection)]
        return actions

    def wait(self, until: float) -> list[UserAction]:
        """Run the timers up to a time."""
        actions: list[UserAction] = []
        while (due := self.machine.deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            actions += self.handle(Tick())
        self.now = until
        return actions

    def serve(self, number: int = 1, connected: Connected | None = None) -> list[UserAction]:
        """Let a connection be opened and answered."""
        answer = FrameReceived(number, connected or Connected("me", "b"))
        return self.handle(ConnectionOpened(number), TokenReady(number, "t"), answer)


def test_alternates_come_first_and_the_broker_that_was_lost_comes_after_another() -> None:
    machine = Machine("a", "b")
    machine.serve(1, Connected("me", "A", ("x", "a")))
    machine.handle(ConnectionClosed(1, 1001, ""))
    for number, at in ((2, 50.0), (3, 100.0), (4, 150.0)):
        machine.wait(at - 45.0)
        machine.handle(ConnectionClosed(number, 1006, ""))
    machine.wait(200.0)
    assert [each.url for each in machine.opened[:5]] == ["a", "x", "a", "b", "x"]


def test_with_two_urls_the_one_that_was_lost_is_the_second() -> None:
    machine = Machine("a", "b")
    machine.serve()
    machine.handle(ConnectionClosed(1, 1012, ""))
    machine.wait(1.0)
    assert [each.url for each in machine.opened] == ["a", "b"]


def test_a_connection_that_is_not_read_is_kept_alive_and_not_taken_for_silent() -> None:
    machine = Machine()
    machine.serve(1, Connected("me", "b", ping_s=25.0))
    assert machine.handle(ReadingPaused(1, True)) == [SendFrame(1, Pong())]
    assert machine.wait(110.0) == [SendFrame(1, Pong())] * 4
    assert machine.handle(ReadingPaused(1, False)) == []
    assert machine.handle(ReadingPaused(1, True)) == []  # not more often than pings
    machine.handle(ReadingPaused(1, False))
    assert machine.wait(144.0) == []
    silent = machine.wait(146.0)
    assert silent[0] == CloseConnection(1, 1001, "the broker is silent")


def test_publications_that_wait_for_a_broker_are_bounded_and_can_be_forgotten() -> None:
    machine = Machine(unsent_max=2)
    assert machine.handle(PublishMessage("one", NEWS, b"1"), PublishMessage("two", NEWS, b"2")) == []
    [refused] = machine.handle(PublishMessage("three", NEWS, b"3"))
    assert isinstance(refused, PublishEnded)
    assert (refused.token, refused.code, refused.is_retryable) == ("three", "too_many_wait", True)
    machine.handle(ForgetPublication("one"))
    sent = [each.frame for each in machine.serve() if isinstance(each, SendFrame)]
    assert [each.payload for each in sent if isinstance(each, PublishRequest)] == [b"2"]


def test_tokens_are_refreshed_again_and_again() -> None:
    machine = Machine(has_token=True)
    machine.serve(1, Connected("me", "b", ping_s=1e6, expires_in_s=100.0))
    assert machine.wait(75.0) == [NeedToken(1)]
    assert machine.handle(TokenReady(1, "t2")) == [SendFrame(1, Refresh("t2"))]
    assert machine.wait(149.0) == []
    assert machine.wait(150.0) == [NeedToken(1)]


def test_a_token_that_is_about_to_expire_is_not_refreshed_all_the_time() -> None:
    machine = Machine(has_token=True)
    machine.serve(1, Connected("me", "b", ping_s=1e6, expires_in_s=1.0))
    assert machine.wait(0.0) == [NeedToken(1)]
    machine.handle(TokenReady(1, "t2"))
    assert machine.wait(24.0) == []


def test_a_token_is_refreshed_by_its_own_life_and_not_by_that_of_a_former_one() -> None:
    machine = Machine(has_token=True)
    machine.handle(ConnectionOpened(1), TokenReady(1, "hour", 5000.0))
    machine.handle(FrameReceived(1, Connected("me", "b", ping_s=1e6, expires_in_s=3600.0)))
    assert machine.wait(3575.0) == [NeedToken(1)]
    machine.handle(TokenReady(1, "a minute later", 5060.0))  # it ends at 3660
    assert machine.wait(3634.9) == []
    assert machine.wait(3635.0) == [NeedToken(1)]
    machine.handle(TokenReady(1, "five minutes later", 5300.0))  # it ends at 3900
    assert machine.wait(3874.9) == []
    assert machine.wait(3875.0) == [NeedToken(1)]
    machine.handle(TokenReady(1, "over", 1.0))
    assert machine.wait(3875.9) == []
    assert machine.wait(3876.0) == [NeedToken(1)]


def test_the_life_of_a_token_that_cannot_be_read_is_that_of_the_last_one() -> None:
    machine = Machine(has_token=True)
    machine.serve(1, Connected("me", "b", ping_s=1e6, expires_in_s=3600.0))
    machine.handle(ConnectionClosed(1, 1006, "lost"))
    machine.wait(1.0)
    machine.serve(2, Connected("me", "b", ping_s=1e6, expires_in_s=100.0))
    assert machine.wait(76.0) == [NeedToken(2)]
    machine.handle(TokenReady(2, "next"))
    assert machine.wait(150.9) == []
    assert machine.wait(151.0) == [NeedToken(2)]


def test_a_close_says_what_the_error_before_it_said() -> None:
    machine = Machine()
    machine.serve()
    machine.handle(FrameReceived(1, Error("full", "no room", "elsewhere")))
    [interrupted] = [
        each for each in machine.handle(ConnectionClosed(1, 1013, "full")) if isinstance(each, Interrupted)
    ]
    assert (interrupted.reason, interrupted.url) == ("full: no room", "a")


def test_an_error_that_ends_nothing_is_reported() -> None:
    machine = Machine(has_token=True)
    machine.serve()
    error = Error("token_refused", "the signature is wrong", "never")
    assert machine.handle(FrameReceived(1, error)) == [Complained("token_refused", "the signature is wrong", "a")]


def test_a_fixed_token_is_not_refreshed_and_its_end_is_final() -> None:
    machine = Machine(has_token=True, has_fixed_token=True)
    machine.serve(1, Connected("me", "b", ping_s=1e6, expires_in_s=30.0))
    assert machine.wait(1000.0) == []
    assert machine.handle(ConnectionClosed(1, 4002, "expired")) == [Failed(4002, "expired")]
    assert machine.machine.deadline() is None


def test_the_end_of_a_subscription_does_not_stop_a_migration() -> None:
    machine = Machine()
    machine.serve()
    machine.handle(AddSubscription(NEWS))
    machine.handle(FrameReceived(1, Move(("b",), 0, 60_000)))
    machine.wait(0.0)
    machine.serve(2, Connected("me", "B"))
    machine.handle(FrameReceived(2, MovedIn()))  # not yet: the subscription is not confirmed there
    actions = machine.handle(RemoveSubscription(NEWS))
    assert Served("B", "b", moved=True) in actions


def test_the_loss_of_the_old_broker_before_the_new_one_answers_is_an_interruption() -> None:
    machine = Machine()
    machine.serve()
    machine.handle(FrameReceived(1, Move(("b",), 0, 60_000)))
    machine.wait(0.0)
    [interrupted] = machine.handle(ConnectionClosed(1, 1006, ""))
    assert isinstance(interrupted, Interrupted)
    assert Served("B", "b", moved=False) in machine.serve(2, Connected("me", "B"))


def test_an_answer_to_an_earlier_subscription_does_not_confirm_a_later_one() -> None:
    machine = Machine()
    machine.serve()
    machine.handle(AddSubscription(NEWS), RemoveSubscription(NEWS), AddSubscription(NEWS))
    assert machine.handle(FrameReceived(1, Subscribed(1, NEWS.id))) == []
    assert machine.handle(FrameReceived(1, Subscribed(2, NEWS.id))) != []


def test_nothing_happens_after_the_end() -> None:
    machine = Machine()
    machine.serve()
    assert machine.handle(Close()) == [CloseConnection(1, 1000, "closed by the application")]
    assert machine.handle(PublishMessage("one", NEWS, b"")) == []
    assert machine.machine.deadline() is None
