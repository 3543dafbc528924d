"""What Redis does with the scripts of the catalog and of executions, for the model of Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynamoth.data.catalog import PUT_SCRIPT
from dynamoth.data.executions import RAISE_TERM_SCRIPT, STORE_SCRIPT
from dynamoth.edge.log import FENCED
from dynamoth.machine.events import ErrorReply


def is_script(words: Sequence[bytes]) -> bool:
    """Tell whether a command is one of these scripts."""
    return len(words) > 1 and words[0] == b"EVAL" and words[1] in (PUT_SCRIPT, RAISE_TERM_SCRIPT, STORE_SCRIPT)


def evaluate(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Do what Redis does; ``execute`` gets the words of a command (GET, SET, HGET, HSET) and returns its reply."""
    keys, arguments = words[3 : 3 + int(words[2])], words[3 + int(words[2]) :]
    if words[1] == PUT_SCRIPT:
        return _put(keys[0], arguments, execute)
    term = int(execute(b"GET", keys[0]) or 0)
    if words[1] == RAISE_TERM_SCRIPT:
        if term < int(arguments[0]):
            execute(b"SET", keys[0], arguments[0])
        return max(term, int(arguments[0]))
    if term > int(arguments[0]):
        return ErrorReply(f"{FENCED} by a newer data cluster, term {term}")
    execute(b"SET", keys[1], arguments[1])
    return b"OK"


def _put(key: bytes, arguments: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    name, version, definition = arguments
    stored = execute(b"HGET", key, name)
    if stored is not None and int(stored.partition(b" ")[0]) >= int(version):
        return stored
    execute(b"HSET", key, name, version + b" " + definition)
    return None
