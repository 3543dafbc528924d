"""What Redis does with the scripts of the catalog and of terms, for the model of Redis."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from dynamoth.data.catalog import PUT_SCRIPT
from dynamoth.data.progress import BEHIND, PROGRESS_SCRIPT, parse_progress
from dynamoth.data.terms import CLAIM_SCRIPT, STORE_SCRIPT, TRIM_SCRIPT
from dynamoth.edge.log import FENCED
from dynamoth.machine.events import ErrorReply

_SCRIPTS = (PUT_SCRIPT, CLAIM_SCRIPT, STORE_SCRIPT, TRIM_SCRIPT, PROGRESS_SCRIPT)


def is_script(words: Sequence[bytes]) -> bool:
    """Tell whether a command is one of these scripts."""
    return len(words) > 1 and words[0] == b"EVAL" and words[1] in _SCRIPTS


def evaluate(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Do what Redis does; ``execute`` executes a command (GET, SET, HGET, HSET, XTRIM), and returns its reply."""
    keys, arguments = words[3 : 3 + int(words[2])], words[3 + int(words[2]) :]
    if words[1] == PUT_SCRIPT:
        return _put(keys[0], arguments, execute)
    term = int(execute(b"GET", keys[0]) or 0)
    if words[1] == CLAIM_SCRIPT:
        return _claim(keys, arguments, term, execute)
    if term > int(arguments[0]):
        return ErrorReply(f"{FENCED} by a newer data cluster, term {term}")
    if words[1] == TRIM_SCRIPT:
        return execute(b"XTRIM", keys[1], b"MINID", arguments[1])
    if words[1] == PROGRESS_SCRIPT:
        before = parse_progress(execute(b"GET", keys[1]))
        if before is not None and before.step < int(arguments[2]):
            return ErrorReply(f"{BEHIND} the progress that was stored here")
    execute(b"SET", keys[1], arguments[1])
    return b"OK"


def _claim(keys: Sequence[bytes], arguments: Sequence[bytes], term: int, execute: Callable[..., Any]) -> Any:
    owner = b" ".join(arguments)
    if term < int(arguments[0]):
        execute(b"SET", keys[0], arguments[0])
        execute(b"SET", keys[1], owner)
        return [int(arguments[0]), 1]
    return [term, int(term == int(arguments[0]) and execute(b"GET", keys[1]) == owner)]


def _put(key: bytes, arguments: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    name, version, definition = arguments
    stored = execute(b"HGET", key, name)
    if stored is not None:
        digits = re.match(rb"\d*", stored)
        if digits and int(digits[0] or 0) >= int(version):
            return stored
    execute(b"HSET", key, name, version + b" " + definition)
    return None
