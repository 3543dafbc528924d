"""What a server says when it refuses commands, in the words of Redis 6.2 and 7.0."""

from __future__ import annotations

import pytest

from dynamoth.refusals import CURES, refusal_code, with_cure

IN_6_2 = "ERR Error running script (call to f_2345e8953989db26): @user_script:10: @user_script: 10: "
IN_7 = " script: 2345e8953989db26, on @user_script:10."

REPLICA = "READONLY You can't write against a read only replica."
NO_RIGHT = "The user executing the script can't run this command or subcommand"


@pytest.mark.parametrize(
    ("reply", "code", "text"),
    [
        (REPLICA, "READONLY", REPLICA),
        (f"{REPLICA}{IN_7}", "READONLY", REPLICA),
        (f"{IN_6_2}-{REPLICA}", "READONLY", REPLICA),
        (f"{IN_6_2}{NO_RIGHT}", "NOPERM", NO_RIGHT),
        (f"ERR {NO_RIGHT}{IN_7}", "NOPERM", f"ERR {NO_RIGHT}."),
        ("it does not let us hear its agent: NOPERM no", "NOPERM", "it does not let us hear its agent: NOPERM no"),
        *((f"{code} because", code, f"{code} because") for code in CURES),
    ],
)
def test_a_refusal_is_recognised_and_has_its_cure(reply: str, code: str, text: str) -> None:
    assert refusal_code(reply) == code
    assert with_cure(reply) == f"{text} ({CURES[code]})"
    assert refusal_code(with_cure(reply)) == code


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "ERR wrong number of arguments for 'set' command",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "FENCED by a newer writer, term 3",
        "ERR FULL: 9 records wait for the archive",
        "OOMPH",
        "it says READONLY",
    ],
)
def test_other_errors_are_shown_as_they_are(reply: str) -> None:
    assert refusal_code(reply) is None
    assert with_cure(reply) == reply
