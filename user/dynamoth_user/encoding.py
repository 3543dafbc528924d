"""Frames on a WebSocket: JSON in text messages, or msgpack in binary ones."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any, Literal, NoReturn, Protocol

from dynamoth.edge.frames import BrokerFrame, UserFrame, read_broker_frame, to_wire
from dynamoth.errors import MalformedMessage
from dynamoth.protocol.wire import pack, parser, read_text_map, shortened, unpack

Encoding = Literal["json", "msgpack"]


class Codec(Protocol):
    """Writes and reads the messages of one subprotocol."""

    subprotocol: str

    def encode(self, frame: UserFrame) -> str | bytes:
        """Return the message of a frame."""
        ...

    def decode(self, message: str | bytes) -> BrokerFrame:
        """Read a message of a broker. Raises MalformedMessage."""
        ...


class JsonCodec:
    """Subprotocol ``dynamoth.v1.json``."""

    subprotocol = "dynamoth.v1.json"

    def encode(self, frame: UserFrame) -> str:
        """Return the message of a frame; bytes are in base64."""
        return _encoder.encode(to_wire(frame))

    def decode(self, message: str | bytes) -> BrokerFrame:
        """Read a message of a broker. Raises MalformedMessage."""
        return read_broker_frame(_read_json(message))


class MsgpackCodec:
    """Subprotocol ``dynamoth.v1.msgpack``."""

    subprotocol = "dynamoth.v1.msgpack"

    def encode(self, frame: UserFrame) -> bytes:
        """Return the message of a frame."""
        return pack(to_wire(frame))

    def decode(self, message: str | bytes) -> BrokerFrame:
        """Read a message of a broker. Raises MalformedMessage."""
        if not isinstance(message, bytes):
            raise MalformedMessage("a binary message expected, not text")
        return read_broker_frame(read_text_map(unpack(message)))


CODECS: dict[Encoding, Codec] = {"json": JsonCodec(), "msgpack": MsgpackCodec()}


@parser("a JSON frame")
def _read_json(message: str | bytes) -> dict[str, Any]:
    if not isinstance(message, str):
        raise MalformedMessage("a text message expected, not a binary one")
    return read_text_map(_decoder.decode(message))


def _refuse_constant(text: str) -> NoReturn:
    raise MalformedMessage(f"{text} is not JSON")


def _base64(value: object) -> str:
    if not isinstance(value, bytes):
        raise TypeError(f"not a value of a frame: {shortened(value)}")
    return b64encode(value).decode()


_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_base64)
_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
