"""Which log servers a folder belongs to: the archive and the checkpoints of others make no sense there.

The first data cluster draws an identity for its log servers. Each of them has it, and so does the file ``identity`` of
the folder. A server that has lost it gets it again; so does a new server, and a new folder.

Each server has its id, too. The id decides what is stored there: with the URLs of two servers exchanged, or with other
ids, nobody would find what is stored, and new records would be where nobody looks for them later. Brokers store their
list of ids at each server, and whoever has another list is refused.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from dynamoth.data.records import DATA_PREFIX
from dynamoth.edge.log import SERVERS_KEY, servers_value
from dynamoth.errors import ConfigError
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.cluster.storage.durable_files import write_text

IDENTITY_KEY = DATA_PREFIX + b"identity"
"""String at every log server: the identity of all of them."""

SERVER_KEY = IDENTITY_KEY + b":server"
"""String at every log server: its own id in the list of log servers."""

IDENTITY_SCRIPT = b"""local found = redis.call('GET', KEYS[1])
if not found and ARGV[1] ~= '' then redis.call('SET', KEYS[1], ARGV[1]) end
return found or ARGV[1]
"""
"""Gives a key a value, unless it has one or this is empty; returns what it has."""


def check_ids(servers: LogServers, where: str) -> None:
    """Raise ConfigError where brokers have other log servers. Raises LogServerFailed, too.

    With other ids than theirs, a part of the records and of the logs would not be found, and nothing would say so.
    ``where`` says what names these servers.
    """
    ours = servers_value(servers.ids)
    for id_ in servers.ids:
        theirs = servers.run(id_, (b"GET", SERVERS_KEY))
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"{where}: these are the log servers {ours.decode()!r}, and brokers have"
                f" {theirs.decode(errors='replace')!r}, says log server {id_}. An id decides which records and logs a"
                " server has: give the same ids and URLs as `broker.logs`"
            )


def check_places(servers: LogServers, where: str) -> None:
    """Raise ConfigError where a data cluster knows a server by another id. Raises LogServerFailed, too."""
    for id_ in servers.ids:
        known = servers.run(id_, (b"GET", SERVER_KEY))
        if known is not None and known != id_.encode():
            raise ConfigError(
                f"{where}: the log server that is called {id_} is {known.decode(errors='replace')} for the data"
                " cluster: give the same ids and URLs as `data_cluster.logs`"
            )


class WrongFolder(ConfigError):
    """Raised when a folder belongs to other log servers than those of the configuration."""


def check_identity(servers: LogServers, folder: Path) -> None:
    """Raise WrongFolder where a folder belongs to other log servers. Raises LogServerFailed and OSError, too.

    A folder or a server without identity gets that of the others.
    """
    file = folder / "identity"
    own = file.read_text().strip() if file.exists() else ""
    known = {id_: _stored(servers, id_, IDENTITY_KEY, "") for id_ in servers.ids}
    identity = own or next(filter(None, known.values()), "") or secrets.token_hex(8)
    for id_, found in known.items():
        if (found or _stored(servers, id_, IDENTITY_KEY, identity)) != identity:
            what = f"the folder {folder} has the files of other log servers" if own else "they are of several clusters"
            raise WrongFolder(
                f"data_cluster.logs, data_cluster.folder: log server {id_} does not belong here: {what}. Name the right"
                f" servers and folder, or a new folder; if these are the right ones, remove {file}, and the key"
                f" {IDENTITY_KEY.decode()} at servers that were others'"
            )
    for id_ in servers.ids:
        former = _stored(servers, id_, SERVER_KEY, id_)
        if former != id_:
            raise WrongFolder(
                f"data_cluster.logs: the log server that is called {id_} now was {former} before: an id decides which"
                f" records and logs a server has. Give each server its former id, here and at the brokers; if what it"
                f" has does not matter, remove its key {SERVER_KEY.decode()}"
            )
    if not own:
        write_text(file, identity + "\n")


def _stored(servers: LogServers, server: str, key: bytes, new: str) -> str:
    """Return the value of a key of a server. Where it has none, it gets ``new``, unless that is empty."""
    reply: bytes = servers.run(server, (b"EVAL", IDENTITY_SCRIPT, b"1", key, new.encode()))
    return reply.decode()
