"""Slots: all channels, in 4096 ranges of the hashes of their names.

The plan has an entry for each slot that was moved, under a reserved name, and channels that the plan does not name
inherit it. So a slot moves as a channel does. The ring says where a slot is that was never moved.
"""

from __future__ import annotations

from hashlib import blake2b

from dynamoth.names import SLOT_PREFIX

SLOTS = 4096
"""How many slots there are. Part of the protocol: another number would move every channel."""

HASH_BITS = 64
_SHIFT = HASH_BITS - (SLOTS - 1).bit_length()

_NAMES = tuple(SLOT_PREFIX + b"%04d" % slot for slot in range(SLOTS))
_NUMBERS = {name: slot for slot, name in enumerate(_NAMES)}


def hash_of(data: bytes) -> int:
    """Return the hash of a name: 64 bits, the same in every process."""
    return int.from_bytes(blake2b(data, digest_size=HASH_BITS // 8).digest(), "big")


def slot_name(slot: int) -> bytes:
    """Return the name of a slot, 0 to ``SLOTS`` - 1, in the plan. No application's channel has such a name."""
    return _NAMES[slot]


def slot_number(name: bytes) -> int | None:
    """Return the number of the slot with this name in the plan; None for the name of a channel."""
    return _NUMBERS.get(name)


def is_slot(name: bytes) -> bool:
    """Return whether a name in the plan is that of a slot."""
    return name in _NUMBERS


def slot_of(channel: bytes) -> bytes:
    """Return the name of the slot of a channel. Takes about a microsecond."""
    return _NAMES[hash_of(channel) >> _SHIFT]


def slot_index(channel: bytes) -> int:
    """Return the number of the slot of a channel."""
    return hash_of(channel) >> _SHIFT


def middle(slot: int) -> int:
    """Return the hash in the middle of a slot."""
    return (2 * slot + 1) << (_SHIFT - 1)
