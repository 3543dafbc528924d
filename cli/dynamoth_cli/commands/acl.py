"""``dynamoth acl``: prints Redis users, for each role with exactly the rights that it needs.

The rights of a role are rights to names (``dynamoth.names``): a message is trusted because only some roles may publish
on its channel. Redis 7 has selectors, which separate publishing from subscribing: there a client can read its inbox and
write to none. Redis 6.2 has one list of channels for both; ``docs/security.md`` says what remains possible there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dynamoth import names
from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY
from dynamoth.data.datasets import DATASET_PREFIX
from dynamoth.data.records import DATA_PREFIX, partition_keys
from dynamoth.data.registrations import registration_keys
from dynamoth.edge.interests import LOG_CHANNEL_PREFIX
from dynamoth.edge.log import LOG_PREFIX, SERVERS_KEY
from dynamoth.edge.positions import POSITION_PREFIX
from dynamoth.errors import ConfigError
from dynamoth.globs import literal_glob, matches_reserved, physical_patterns
from dynamoth_cli.text_files import UnreadableFile, read_text_file

ROLES = (
    *("agent", "balancer", "broker", "client", "coordinator"),
    *("data-cluster", "data-operator", "data-writer", "operator", "recorder"),
)

REDIS_VERSIONS = ("6.2", "7", "7.2")
"""7 has selectors and read-only keys. ``client|setinfo`` came with 7.2; 7.0 refuses a rule for it, 6.2 takes any."""

PASSWORD_VARIABLE = "DYNAMOTH_ACL_{}_PASSWORD"  # the name of a variable, which holds one

_FOR_ALL = ("+hello", "+auth", "+ping", "+info", "+client|setname", "+client|id")

_APPENDING = (
    *("+eval", "+get", "+hgetall", "+hmget", "+hset", "+hincrby", "+time", "+xadd", "+xlen"),
    *("+zadd", "+zremrangebyscore", "+pexpire"),
)
"""Reads definitions, and stores records of datasets."""

_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "agent": (
        *("+subscribe", "+psubscribe", "+unsubscribe", "+punsubscribe", "+publish", "+hgetall", "+hmget"),
        *("+pubsub|numsub", "+pubsub|channels", "+client|list", "+client|kill", "+config|get"),
    ),
    "balancer": (
        *("+subscribe", "+publish", "+hset", "+hlen", "+hmget", "+hgetall", "+rename", "+del"),
        *("+eval", "+set", "+get", "+pexpire", "+pubsub|numsub", "+pubsub|channels"),
    ),
    "client": (
        *("+subscribe", "+psubscribe", "+unsubscribe", "+punsubscribe", "+publish", "+hmget"),
        *("+pubsub|numsub", "+pubsub|channels", "+pubsub|numpat"),
    ),
    "broker": (
        *("+subscribe", "+unsubscribe", "+publish", "+hmget", "+pubsub|numsub", "+pubsub|channels"),
        *("+eval", "+hset", "+hdel", "+del", "+pexpire", "+xadd", "+xrange", "+get", "+set"),
        *("+time", "+hget", "+hgetall", "+hlen", "+hscan", "+zadd", "+zrem", "+zscore", "+zrangebyscore"),
        *("+hincrby", "+xlen", "+zremrangebyscore"),
    ),
    "coordinator": ("+subscribe", "+publish", "+set", "+get", "+pexpire", "+del", "+pubsub|numsub"),
    "data-cluster": (
        *("+subscribe", "+unsubscribe", "+publish", "+pubsub|numsub", "+pubsub|channels", *_APPENDING),
        *("+mget", "+set", "+del", "+hget", "+hdel", "+hscan", "+xrange", "+xrevrange", "+xtrim"),
        *("+zrem", "+zscore", "+zrangebyscore"),
    ),
    "data-operator": (*(*_APPENDING, "+set", "+del", "+expire", "+hget", "+hlen", "+hscan", "+xrevrange", "+xrange"),),
    "data-writer": _APPENDING,
    "operator": ("+subscribe", "+unsubscribe", "+publish", "+hmget", "+hgetall", "+pubsub|numsub"),
    "recorder": ("+subscribe", "+psubscribe", "+unsubscribe", "+publish", "+hmget"),
}

_RECORD_KEYS = partition_keys("*")
_INTEREST_KEYS = registration_keys("*")


@dataclass(frozen=True, slots=True)
class Rights:
    """The keys and channels of a role."""

    keys_read: tuple[bytes, ...] = ()
    keys_written: tuple[bytes, ...] = ()
    #: Patterns of channels for publishing and subscribing alike.
    both: tuple[bytes, ...] = ()
    #: Patterns of channels that the role only subscribes to, or only publishes on, besides.
    listens: tuple[bytes, ...] = ()
    speaks: tuple[bytes, ...] = ()
    all_channels: bool = False
    #: The commands for ``listens``. A pattern must be among them literally.
    listening: tuple[str, ...] = ("+subscribe",)


@dataclass(frozen=True, slots=True)
class User:
    """A Redis user: its name and its rules, without a password."""

    role: str
    name: str
    rules: tuple[str, ...] = field(default=())


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--channels",
        metavar="PATTERN",
        nargs="+",
        action="extend",
        default=[],
        help="what clients may publish on and subscribe to, as Redis' patterns: 'news.*'. The pattern that a client"
        " gives to psubscribe must be among them, literally. Sharded channels of these names are allowed with them",
    )
    parser.add_argument(
        "--redis",
        choices=REDIS_VERSIONS,
        default=REDIS_VERSIONS[0],
        help="the version of the servers: 7 for 7.0, 7.2 for all later ones and for Valkey (default %(default)s). From"
        " 7 on, clients have fewer rights",
    )
    parser.add_argument("--aclfile", action="store_true", help="print lines for an aclfile, not ACL SETUSER commands")
    parser.add_argument("--prefix", default="dynamoth-", help="prefix of the users' names (default %(default)s)")
    parser.add_argument("--role", choices=ROLES, nargs="+", default=list(ROLES), help="print only these (default: all)")
    variables = PASSWORD_VARIABLE.format("<ROLE>")
    parser.add_argument(
        "--passwords",
        type=Path,
        metavar="FILE",
        help="a file with a line 'role password' for each role; their SHA-256 is printed. Without it, passwords come"
        f" from {variables}; for a role without one, a placeholder is printed, which Redis refuses",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the users."""
    channels = [os.fsencode(pattern) for pattern in arguments.channels]
    prefix: str = arguments.prefix
    if not prefix.isprintable() or any(character in " \"'" for character in prefix):
        raise ConfigError(f"--prefix {prefix!r}: the name of a user of Redis cannot hold spaces, quotes or line breaks")
    if {"client", "broker"} & {*arguments.role} and not channels:
        raise ConfigError(
            "which channels may clients, and users of brokers, use? Give --channels 'news.*' (or --role for the other"
            " roles alone)"
        )
    passwords = read_passwords(arguments.passwords, os.environ)
    users = [make_user(role, channels, arguments.redis, prefix) for role in arguments.role]
    sys.stdout.write("".join(f"{line}\n" for line in to_lines(users, passwords, aclfile=arguments.aclfile)))
    missing = [user.role for user in users if user.role not in passwords]
    if missing:
        sys.stderr.write(
            f"dynamoth: no password for {', '.join(missing)}: replace #SHA256-OF-... by > and the password, or by # and"
            " its SHA-256\n"
        )
    sys.stderr.write(
        "dynamoth: load this at every server; then take the rights of the default user away (ACL SETUSER default off),"
        " or all this protects nothing\n"
    )
    return 0


def make_user(role: str, channels: Sequence[bytes], redis: str, prefix: str = "dynamoth-") -> User:
    """Return the user of a role.

    Args:
        role: one of ``ROLES``.
        channels: the patterns of channels that clients may use.
        redis: one of ``REDIS_VERSIONS``.
        prefix: of the user's name.

    Raises:
        ConfigError: a pattern cannot be a rule.

    """
    rights = rights_of(role, channels)
    common = list(_FOR_ALL) if redis == "7" else [*_FOR_ALL, "+client|setinfo"]
    own = list(_COMMANDS[role])
    rules = _one_list(rights, common + own) if redis == "6.2" else _selectors(rights, common, own)
    return User(role, prefix + role, tuple(rules))


def rights_of(role: str, channels: Sequence[bytes]) -> Rights:
    """Return the keys and channels of a role; ``channels`` are those that clients may use."""
    match role:
        case "agent":
            return Rights(keys_read=(names.PLAN_KEY,), all_channels=True)
        case "balancer":
            return Rights(
                keys_written=(names.PLAN_KEY, names.PLAN_KEY_NEW, names.BALANCER_LEASE_KEY, names.TERM_KEY),
                listens=(names.BALANCER_CHANNEL, names.OPERATOR_CHANNEL),
                speaks=(names.AGENT_CHANNEL, names.RECORD_CHANNEL, names.OPERATOR_INBOX_PREFIX + b"*"),
            )
        case "broker":
            return _broker_rights(channels)
        case "coordinator":
            return Rights(
                keys_written=(names.COORDINATOR_LEASE_KEY, names.COORDINATOR_ORDERS_KEY),
                listens=(names.COORDINATOR_CHANNEL, names.OPERATOR_EDGE_CHANNEL),
                speaks=(
                    *(names.BROKERS_CHANNEL, names.BROKER_PREFIX + b"*", names.COORDINATOR_RECORD_CHANNEL),
                    names.OPERATOR_INBOX_PREFIX + b"*",
                ),
            )
        case "data-cluster":
            client = _client_rights([LOG_CHANNEL_PREFIX + b"*", DATASET_PREFIX.encode() + b"*"])
            return replace(client, keys_written=(LOG_PREFIX + b"*", DATA_PREFIX + b"*"))
        case "data-operator":
            return Rights(keys_read=(SERVERS_KEY,), keys_written=(DATA_PREFIX + b"*",))
        case "data-writer":
            return Rights(keys_read=(SERVERS_KEY, DATASETS_KEY, QUERIES_KEY), keys_written=_RECORD_KEYS)
        case "operator":
            return Rights(
                keys_read=(names.PLAN_KEY,),
                listens=(names.OPERATOR_INBOX_PREFIX + b"*",),
                speaks=(names.OPERATOR_CHANNEL, names.OPERATOR_EDGE_CHANNEL),
            )
        case "recorder":
            return Rights(
                keys_read=(names.PLAN_KEY,),
                both=(names.RECORDER_PREFIX + b"*",),
                listens=(
                    *(names.BALANCER_CHANNEL, names.RECORD_CHANNEL),
                    *(names.COORDINATOR_CHANNEL, names.COORDINATOR_RECORD_CHANNEL),
                ),
                listening=("+subscribe", "+psubscribe"),
            )
        case _:
            return _client_rights(channels)


def _client_rights(channels: Sequence[bytes]) -> Rights:
    both: list[bytes] = []
    listens = [names.INBOX_PREFIX + b"*"]
    speaks = [names.ANNOUNCE_CHANNEL]
    for pattern in channels:
        _check(pattern)
        both += physical_patterns(pattern)  # the last one is for replicas
        both += [names.SHARDED_PREFIX + pattern, names.SHARDED_REPLICA_PREFIX + names.ANY_EPOCH + pattern]
        listens.append(names.PATTERN_PREFIX + literal_glob(pattern))
        speaks += [
            names.forward_channel(names.replica_pattern(pattern)),
            names.forward_channel(names.SHARDED_REPLICA_PREFIX + names.ANY_EPOCH + pattern),
        ]
    return Rights((names.PLAN_KEY,), (), tuple(dict.fromkeys(both)), tuple(listens), tuple(speaks))


def _broker_rights(channels: Sequence[bytes]) -> Rights:
    """Return the rights of a broker: those of a client, for its users and for logs, and what it says for itself.

    For its data cluster it stores records and registers interests; it writes no definition.
    """
    client = _client_rights([*channels, LOG_CHANNEL_PREFIX + b"*"])
    return Rights(
        (*client.keys_read, DATASETS_KEY, QUERIES_KEY),
        (LOG_PREFIX + b"*", POSITION_PREFIX + b"*", *_RECORD_KEYS, *_INTEREST_KEYS),
        client.both,
        (*client.listens, names.BROKERS_CHANNEL, names.BROKER_PREFIX + b"*", names.OPERATOR_EDGE_CHANNEL),
        (*client.speaks, names.COORDINATOR_CHANNEL, names.OPERATOR_INBOX_PREFIX + b"*"),
    )


def _check(pattern: bytes) -> None:
    """Refuse a pattern that would allow more than an application's channels, or that an ACL cannot hold."""
    shown = f"--channels {os.fsdecode(pattern)!r}"
    if not pattern or any(byte <= 0x20 or byte >= 0x7F or byte in b"\"'()" for byte in pattern):
        raise ConfigError(
            f"{shown}: a rule of Redis cannot hold spaces, quotes, parentheses, or bytes beyond ASCII: match these by ?"
        )
    plain = physical_patterns(pattern)[:-1]
    if not plain:
        raise ConfigError(f"{shown} matches nothing but names of Dynamoth's own, which clients must not use")
    if any(map(matches_reserved, plain)):
        raise ConfigError(
            f"{shown} would allow channels of Dynamoth's own ({names.RESERVED_PREFIX.decode()}...), and has too many"
            " stars to exclude the others: give several patterns that begin with plain letters"
        )


def _one_list(rights: Rights, commands: Iterable[str]) -> list[str]:
    """Return the rules for Redis 6.2, which does not distinguish reading and writing of keys and channels."""
    keys = [f"~{key.decode()}" for key in (*rights.keys_read, *rights.keys_written)]
    channels = _channels(rights, (*rights.both, *rights.listens, *rights.speaks))
    return [*keys, *channels, "-@all", *commands]


def _selectors(rights: Rights, common: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the rules for Redis 7: one selector for what is only listened to, another for what is only said."""
    keys = [f"%R~{key.decode()}" for key in rights.keys_read] + [f"~{key.decode()}" for key in rights.keys_written]
    if rights.all_channels or not (rights.both or rights.listens or rights.speaks):
        return [*keys, *_channels(rights, ()), "-@all", *common, *own]
    listening = (*rights.listening, *_channels(rights, (*rights.both, *rights.listens)))
    speaking = ("+publish", *_channels(rights, (*rights.both, *rights.speaks)))
    rest = [command for command in own if command not in (*rights.listening, "+publish")]
    selectors = [f"(-@all {' '.join(rules)})" for rules in (listening, speaking)]
    return [*keys, *_channels(rights, rights.both), "-@all", *common, *rest, *selectors]


def _channels(rights: Rights, patterns: Iterable[bytes]) -> list[str]:
    if rights.all_channels:
        return ["allchannels"]
    return ["resetchannels", *(f"&{pattern.decode()}" for pattern in patterns)]


def to_lines(users: Iterable[User], passwords: Mapping[str, str], *, aclfile: bool) -> list[str]:
    """Return one line for each user: of an aclfile, or a command for redis-cli."""
    lines: list[str] = []
    for user in users:
        password = passwords.get(user.role)
        digest = f"SHA256-OF-{user.role.upper()}-PASSWORD"
        if password is not None:
            digest = hashlib.sha256(password.encode()).hexdigest()
        rules = ["on", f"#{digest}", *user.rules]
        # Redis appends rules to those that a user has: reset takes them away. An aclfile begins without any.
        words = ["user", user.name, *rules] if aclfile else ["ACL", "SETUSER", user.name, "reset", *map(_quoted, rules)]
        lines.append(" ".join(words))
    return lines


def _quoted(rule: str) -> str:
    """Return a rule as redis-cli reads it: a selector has spaces."""
    if " " not in rule:
        return rule
    escaped = rule.replace("\\", "\\\\")
    return f'"{escaped}"'


def read_passwords(file: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the passwords by role: those of the file, else those of the environment.

    Raises:
        ConfigError: the file cannot be read, or a line is not a role and a password.

    """
    variables = {role: PASSWORD_VARIABLE.format(role.upper().replace("-", "_")) for role in ROLES}
    found = {role: environment.get(variable, "") for role, variable in variables.items()}
    if file is not None:
        try:
            lines = read_text_file(file).splitlines()
        except UnreadableFile as error:
            raise ConfigError(f"--passwords {file}: cannot be read as text: {error}") from error
        for number, line in enumerate(lines, 1):
            role, _, password = line.strip().partition(" ")
            if line.strip() and (role not in ROLES or not password.strip()):
                raise ConfigError(
                    f"--passwords {file}, line {number}: a role ({', '.join(ROLES)}), a space, a password"
                )
            if line.strip():
                found[role] = password.strip()
    return {role: password for role, password in found.items() if password}
