"""What a Redis server says when it answers but refuses a command because of its own state: the cause, and the cure.

Such a refusal does not go away by sending something else: somebody has to do something at the server, or has to wait
for it. Errors of single commands (a wrong type, too many arguments) are not among these.
"""

from __future__ import annotations

import re

_REPLICA = "it is a replica: end that with REPLICAOF NO ONE, or let the setting name its primary"
_PASSWORD = "the password was changed: give the new one, and restart what has the old one"

CURES = {
    "OOM": "raise maxmemory, or make room there",
    "READONLY": _REPLICA,
    "MASTERDOWN": _REPLICA,
    "NOPERM": "give the user the rights that 'dynamoth acl' prints",
    "NOAUTH": _PASSWORD,
    "WRONGPASS": _PASSWORD,
    "MISCONF": "it cannot save to its disk: make room there, and see its log",
    "NOREPLICAS": "it misses the replicas that its min-replicas-to-write asks for",
    "LOADING": "it loads its data: wait until it has finished",
    "BUSY": "a script runs there for too long: end it with SCRIPT KILL",
}
"""What to do, by Redis's code of the refusal."""

#: At the beginning, or behind what one of our processes says about it.
_CODE = re.compile(rf"(?:^|: )({'|'.join(CURES)})\b")

#: Redis 6.2 puts the place in the script in front of an error, and Redis 7 puts it behind.
_BEFORE = re.compile(r"(?:ERR )?Error running script \(call to \w+\): (?:@user_script: ?\d+: )+-?")
_BEHIND = re.compile(r"\.? script: \w+, on @user_script:\d+\.$")

#: The rights of the user, in the words that both versions use for a command inside a script.
_NO_RIGHTS = "The user executing the script can't"


def refusal_code(reply: str) -> str | None:
    """Return the key of ``CURES`` for an error that a server replied; None for errors of single commands."""
    text = without_place(reply)
    found = _CODE.search(text)
    if found is None:
        return "NOPERM" if _NO_RIGHTS in text else None
    return found[1]


def with_cure(reply: str) -> str:
    """Return an error that a server replied, for people: with the cure where one is known."""
    text, code = without_place(reply), refusal_code(reply)
    return text if code is None else f"{text} ({CURES[code]})"


def without_place(reply: str) -> str:
    """Return what a server replied without the place in our script, which only says something to us."""
    return _BEHIND.sub(".", _BEFORE.sub("", reply))
