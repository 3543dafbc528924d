"""Records in the body of a POST, and the answer to it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from dynamoth.errors import MalformedMessage

RECORDS_MAX = 1000
"""Records of one request."""


def split_records(body: bytes) -> list[bytes]:
    """Return the records of a body: one JSON object, an array of them, or one in each line. Raises MalformedMessage."""
    text = body.strip()
    if not text:
        raise MalformedMessage("the body is empty: send a JSON object, an array of them, or one in each line")
    if text.startswith(b"["):
        try:
            records = _items(text.decode())
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"the body is no JSON: {error!s:.100}") from None
        if not records:
            raise MalformedMessage("the array is empty: send at least one record")
    elif b"\n" in text:
        records = [line for line in text.splitlines() if line.strip()]
        if not records[0].rstrip().endswith(b"}"):  # one object over several lines
            records = [text]
    else:
        records = [text]
    if len(records) > RECORDS_MAX:
        raise MalformedMessage(f"a request has at most {RECORDS_MAX} records, this one has {len(records)}")
    return records


def _items(text: str) -> list[bytes]:
    """Return the values of an array as they are written. Raises ValueError, RecursionError."""
    read, space = json.JSONDecoder().raw_decode, re.compile(r"[ \t\n\r]*")

    def behind_space(at: int) -> int:
        found = space.match(text, at)
        return at if found is None else found.end()

    def is_end(at: int) -> bool:
        return at == len(text) - 1 and text[at] == "]"

    items: list[bytes] = []
    at = behind_space(1)
    if is_end(at):
        return items
    while True:
        _, end = read(text, at)
        items.append(text[at:end].encode())
        at = behind_space(end)
        if is_end(at):
            return items
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("',' or the end of the array expected", text, at)
        at = behind_space(at + 1)


def records_answer(outcomes: Sequence[tuple[str, str]]) -> tuple[HTTPStatus, dict[str, Any]]:
    """Return status and body of the answer.

    200: everything is stored that is not refused for good. 503: what is not stored may be sent again, and so may the
    whole request if the dataset has an id.
    """
    stored = sum(code == "stored" for code, _ in outcomes)
    duplicates = sum(code == "duplicate" for code, _ in outcomes)
    refused = [
        {"index": index, "code": code, "reason": reason}
        for index, (code, reason) in enumerate(outcomes)
        if code not in ("stored", "duplicate")
    ]
    body: dict[str, Any] = {"stored": stored, "duplicates": duplicates, "refused": refused}
    temporary = next(
        (each for each in refused if each["code"] not in ("bad_record", "unknown_dataset", "forbidden")), None
    )
    if temporary is not None:
        return HTTPStatus.SERVICE_UNAVAILABLE, body | {"error": temporary["reason"], "retry": "later"}
    for code, status in (("unknown_dataset", HTTPStatus.NOT_FOUND), ("forbidden", HTTPStatus.FORBIDDEN)):
        if refused and refused[0]["code"] == code:
            return status, body | {"error": refused[0]["reason"], "retry": "never"}
    if refused and not stored and not duplicates:
        return HTTPStatus.UNPROCESSABLE_ENTITY, body | {"error": refused[0]["reason"], "retry": "never"}
    return HTTPStatus.OK, body
