"""Delivers live interests: drops copies, and merges the streams of two brokers during a migration.

A live interest has no offsets; its messages have a publisher and a number. The old broker's stream is complete, and the
new broker's is complete from its confirmation on. So a message of the new broker is delivered at once only if it is the
next of its publisher. The others are held until the old broker says that everything from before has come.
"""

from __future__ import annotations

from dynamoth.edge.frames import Data
from dynamoth_user.machine.events import Deliver, DeliverGap, UserAction, UserOptions
from dynamoth_user.machine.records import HeldPublication, UserSubscription

NUMBERS_MISSING = "a publication of the former broker did not come"


class LiveDelivery:
    """Decides when a message of a live interest is delivered; what it remembers is in the subscription."""

    def __init__(self, options: UserOptions) -> None:
        """Take the bounds from ``options``."""
        self._options = options

    def on_data(self, subscription: UserSubscription, frame: Data, *, from_new: bool) -> list[UserAction]:
        """Deliver a message, hold it, or drop it. ``from_new``: it came from the new broker of a migration."""
        place = frame.p
        if place is not None and _is_copy(subscription, place):
            return []
        if from_new and (subscription.awaits_old or subscription.held) and not _is_next(subscription, place):
            subscription.held.append(HeldPublication(frame.payload, place))
            if len(subscription.held) > self._options.held_max:
                return self.release(subscription, NUMBERS_MISSING)
            return []
        actions = self._hand_out(subscription, frame.payload, place)
        if subscription.held and not subscription.awaits_old:
            actions += self.release_ready(subscription)
        return actions

    def release_ready(self, subscription: UserSubscription) -> list[UserAction]:
        """Deliver the held messages that are the next ones of their publishers; keep the others."""
        actions: list[UserAction] = []
        waiting: list[HeldPublication] = []
        stopped: set[int] = set()
        for each in subscription.held:
            place = each.place
            if place is None:
                actions += self._hand_out(subscription, each.payload, None)
            elif place[0] in stopped:
                waiting.append(each)
            elif not _is_copy(subscription, place):
                latest = subscription.numbers.get(place[0])
                if latest is not None and place[1] != latest + 1:
                    stopped.add(place[0])
                    waiting.append(each)
                else:
                    actions += self._hand_out(subscription, each.payload, place)
        subscription.held = waiting
        return actions

    def release(self, subscription: UserSubscription, reason: str) -> list[UserAction]:
        """Deliver all held messages, with a gap for those that did not come."""
        actions = self.release_ready(subscription)
        held, subscription.held = subscription.held, []
        if held:
            actions.append(DeliverGap(subscription.interest, reason))
        for each in held:
            if each.place is None or not _is_copy(subscription, each.place):
                actions += self._hand_out(subscription, each.payload, each.place)
        return actions

    def _hand_out(
        self, subscription: UserSubscription, payload: bytes, place: tuple[int, int] | None
    ) -> list[UserAction]:
        if place is not None:
            numbers = subscription.numbers
            numbers.pop(place[0], None)  # the latest is last
            numbers[place[0]] = place[1]
            if len(numbers) > self._options.publishers_max:
                del numbers[next(iter(numbers))]
        return [Deliver(subscription.interest, payload, None)]


def _is_copy(subscription: UserSubscription, place: tuple[int, int]) -> bool:
    latest = subscription.numbers.get(place[0])
    return latest is not None and place[1] <= latest


def _is_next(subscription: UserSubscription, place: tuple[int, int] | None) -> bool:
    """Whether a message is the next of its publisher, and no other of this publisher is held."""
    if place is None or subscription.numbers.get(place[0]) != place[1] - 1:
        return False
    return not any(each.place is not None and each.place[0] == place[0] for each in subscription.held)
