"""Publishes what users publish: on live channels by the Dynamoth client, on logged ones after the append to the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dynamoth.data.datasets import DATASET_PREFIX
from dynamoth.edge.frames import Error, Published, PublishRequest
from dynamoth.edge.interests import Interest
from dynamoth.edge.log import Appended, is_fenced
from dynamoth.edge.publications import LoggedPublication, Position, pack_publication
from dynamoth.protocol.wire import shortened
from dynamoth.refusals import with_cure
from dynamoth_broker.events import RETRY_MS, BrokerAction, PublishMessage, Transmit
from dynamoth_broker.logs import Logs
from dynamoth_broker.records import Records
from dynamoth_broker.sessions import Session
from dynamoth_broker.subscribing import reserved

NO_DATASETS = "this broker has no datasets: see broker.data_cluster"


def not_allowed(channel: str) -> str:
    """Return why a user may not publish on a channel whose name is one for users."""
    return f"publishing on {shortened(channel)} needs a token whose claim 'publish' allows it"


class Publishing:
    """The publications of one broker's users. ``is_logged`` says which interests have a log."""

    def __init__(self, logs: Logs, is_logged: Callable[[Interest], bool], records: Records | None) -> None:
        """Begin; ``logs`` and ``records`` are shared with the owner. Without the latter, there are no datasets."""
        self._logs = logs
        self._is_logged = is_logged
        self._records = records

    def publish(self, session: Session, request: PublishRequest, now: float) -> list[BrokerAction]:
        """Publish, or say why not."""
        interest, ref, connection = request.channel, request.ref, session.connection
        is_record = interest.name.startswith(DATASET_PREFIX)
        if interest.is_reserved and not is_record:
            return [Transmit(connection, Error("forbidden", reserved(interest), ref=ref))]
        if not session.grant.may_publish(interest.name):
            return [Transmit(connection, Error("forbidden", not_allowed(interest.name), ref=ref))]
        if is_record:
            if self._records is not None:
                return self._records.publish(session, request, now)
            return [Transmit(connection, Error("unknown_dataset", NO_DATASETS, ref=ref))]
        if not self._is_logged(interest):
            token = partial(self._published, session, ref)
            return [PublishMessage(interest.name.encode(), request.payload, token)]
        if not self._logs.is_configured:
            return [Transmit(connection, Error("log_unavailable", "this broker has no log servers", ref=ref))]
        return self._logs.append(interest.id, request.payload, partial(self._appended, session, request), now)

    def _published(self, session: Session, ref: int, reason: str | None) -> list[BrokerAction]:
        if reason is None:
            return [Transmit(session.connection, Published(ref))]
        error = Error("unknown_outcome", f"it may not have been published: {reason}", "later", RETRY_MS, ref)
        return [Transmit(session.connection, error)]

    def _appended(
        self, session: Session, request: PublishRequest, result: Appended | str, now: float
    ) -> Sequence[BrokerAction]:
        if isinstance(result, str) and is_fenced(result):
            text = "this channel is published on by one backend only"
            return [Transmit(session.connection, Error("forbidden", text, ref=request.ref))]
        if isinstance(result, str):
            unknown = result == "unknown"
            code = "unknown_outcome" if unknown else "log_unavailable"
            server = self._logs.server_of(request.channel.id)
            refused = f"log server {server}: {with_cure(result)}; nothing is stored"
            text = "the connection to the log was lost: it may or may not be stored" if unknown else refused
            return [Transmit(session.connection, Error(code, text, "later", RETRY_MS, request.ref))]
        publication = LoggedPublication(result.epoch, result.offset, request.payload)
        position = Position(result.epoch, result.offset)
        return [
            PublishMessage(request.channel.log_channel, pack_publication(publication)),
            Transmit(session.connection, Published(request.ref, position)),
        ]
