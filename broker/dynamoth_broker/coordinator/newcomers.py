"""Where users can go: the brokers that a newcomer tries, in order, and those that a broker sends its users to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamoth.edge.frames import URLS_MAX
from dynamoth_broker.coordinator.model import BrokerLoad, LoadModel, Standing
from dynamoth_broker.coordinator.placement import NearestPlacement, Newcomer, Reservations
from dynamoth_broker.coordinator.settings import CoordinatorOptions

if TYPE_CHECKING:
    from dynamoth_broker.coordinator.machine import CoordinatorMachine


class Newcomers:
    """The placement of one coordinator, and what is reserved for the users that it has placed."""

    def __init__(self, machine: CoordinatorMachine, options: CoordinatorOptions) -> None:
        """Begin without reservations."""
        self._machine = machine
        self.reservations = Reservations(options.appear_s)
        self.placement = NearestPlacement(self.reservations, options.ratio_accept)

    def place(self, session: str, now: float, near: tuple[float, float] | None) -> tuple[str, ...]:
        """Return the URLs that a newcomer tries, in order; see ``CoordinatorMachine.place``."""
        newcomer, controller = Newcomer(id=session, location=near), self._machine.controller
        first = controller.place(newcomer, now)
        return self._ranked(controller.placement_model(now), now, first, newcomer)

    def open_urls(self, now: float) -> tuple[str, ...]:
        """Return the URLs of brokers that admit users, the least loaded one first."""
        return self._ranked(self._machine.controller.placement_model(now, 0.0), now)

    def _ranked(
        self, model: LoadModel, now: float, first: str | None = None, newcomer: Newcomer | None = None
    ) -> tuple[str, ...]:
        """Return the URLs of brokers that admit users: ``first``, then the nearest, then the least loaded ones."""

        def rank(broker: BrokerLoad) -> tuple[bool, tuple[int, float], float, str]:
            nearness = (0, 0.0) if newcomer is None else self.placement.nearness(newcomer, broker)
            return broker.id != first, nearness, broker.ratio, broker.id

        standing = self._machine.controller.fleet.standing  # the model may be a little old
        admitting = [each for each in model.brokers.values() if standing(each.id, now) is Standing.OPEN]
        urls = [url for each in sorted(admitting, key=rank) if (url := self._machine.roster.url(each.id))]
        return tuple(urls[:URLS_MAX])
