"""Commands given by name (``execute_command``): which go to the whole cluster, and how they enter a pipeline."""

from __future__ import annotations

from typing import Any

from dynamoth.names import AGENT_CHANNEL, sharded_channel
from dynamoth_client.redis_py.constructor import encoded, is_server_local
from dynamoth_client.redis_py.pools import Pool
from dynamoth_client.redis_py.settings import connection_encoder

COUNT_AGENTS = ("PUBSUB", "NUMSUB", AGENT_CHANNEL)
"""Asks a server for the number of its agents, which it counts as receivers. The number is the last item of the
answer."""

_QUESTIONS_MAX = {"CHANNELS": 1, "NUMSUB": None, "NUMPAT": 0, "SHARDCHANNELS": 1, "SHARDNUMSUB": None}
"""Subcommands of PUBSUB that the whole cluster answers, and their most arguments; None for any number."""


def routed(args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]] | None:
    """Return the client's method for a command, and its arguments; None for a command that the first server executes.

    That is ``publish``, ``spublish`` or ``pubsub_...``. A command with a wrong number of arguments goes to Redis, which
    refuses it.
    """
    name = _upper(args[0]) if args else ""
    if name in ("PUBLISH", "SPUBLISH"):
        return (name.lower(), args[1:]) if len(args) == 3 else None
    if not name.startswith("PUBSUB"):
        return None
    words, rest = name.split(), args[1:]
    if len(words) == 1 and rest:
        words, rest = [*words, _upper(rest[0])], rest[1:]
    if len(words) != 2 or words[0] != "PUBSUB" or words[1] not in _QUESTIONS_MAX:
        return None
    most = _QUESTIONS_MAX[words[1]]
    return None if most is not None and len(rest) > most else ("_".join(words).lower(), rest)


def as_redis_py(args: tuple[Any, ...], answer: Any) -> Any:
    """Return the answer of a method that was ``routed`` to, as redis-py gives it for the command.

    That has counts in pairs for ``PUBSUB NUMSUB`` in one word, and in one list, as they come, for two.
    """
    if _upper(args[0]) == "PUBSUB" and _upper(args[1]).endswith("NUMSUB"):
        return [part for pair in answer for part in pair]
    return answer


def in_pipeline(pool: Pool, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a command as it goes into a pipeline: SPUBLISH as the PUBLISH that it is, so that agents can forward it.

    Raises ``redis.exceptions.DataError`` for a channel that is Dynamoth's own.
    """
    if len(args) != 3 or (name := _upper(args[0])) not in ("PUBLISH", "SPUBLISH"):
        return args
    channel = encoded(connection_encoder(pool).encode, args[1])
    if name == "SPUBLISH":
        return "PUBLISH", sharded_channel(channel), args[2]
    is_server_local(channel)  # may raise
    return args


def is_publication(args: tuple[Any, ...]) -> bool:
    """Tell whether a command in a pipeline is a PUBLISH."""
    return _upper(args[0]) == "PUBLISH"


def without_agents(receivers: Any, agents: int) -> Any:
    """Return the reply to a PUBLISH in a pipeline, a number or an error, less the agents among the receivers."""
    return max(0, receivers - agents) if isinstance(receivers, int) else receivers


def _upper(word: Any) -> str:
    """Return a word of a command, which may be text or bytes, in upper case; empty for anything else."""
    if isinstance(word, bytes):
        return word.decode(errors="replace").upper()
    return word.upper() if isinstance(word, str) else ""
