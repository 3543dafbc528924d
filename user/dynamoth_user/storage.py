"""Keeps a client's session and positions, so that its next run goes on where this one has ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from inspect import isawaitable
from pathlib import Path
from typing import Any, Protocol

from dynamoth.edge.frames import EXACT_MAX
from dynamoth.edge.publications import Position
from dynamoth.protocol.wire import parser, read_natural, read_text, read_text_map
from dynamoth_user.errors import StorageError

SAVE_S = 0.2
"""Time between the beginnings of two saves, at least: what a crash loses, beside what one save takes."""

POSITIONS_MAX = 10_000
"""Positions that are kept; with more, the one that was not changed for the longest time is dropped."""

_log = logging.getLogger("dynamoth_user")


class Storage(Protocol):
    """Where a client keeps its state between runs. Both functions may be asynchronous; neither is called twice at once.

    The state is a map that JSON can write. Only one client at a time may use a storage.
    """

    def load(self) -> dict[str, Any] | Awaitable[dict[str, Any] | None] | None:
        """Return what was saved last; None if nothing was."""
        ...

    def save(self, state: dict[str, Any]) -> Awaitable[None] | None:
        """Save a state in place of the last one: all of it, or nothing."""
        ...


class FileStorage:
    """Keeps the state in one JSON file, which is replaced as a whole.

    Args:
        path: of the file; its folder has to exist.

    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    async def load(self) -> dict[str, Any] | None:
        """Return what the file has; None if there is none. Raises OSError, StorageError."""
        return await asyncio.to_thread(self._load)

    async def save(self, state: dict[str, Any]) -> None:
        """Replace the file. Raises OSError."""
        await asyncio.to_thread(self._save, json.dumps(state))

    def _load(self) -> dict[str, Any] | None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            return read_text_map(json.loads(text))
        except Exception as error:
            raise StorageError(f"{self._path} has no state of a client: {error}") from error

    def _save(self, text: str) -> None:
        beside = self._path.with_name(f"{self._path.name}.tmp")
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)


@dataclass(slots=True)
class SavedState:
    """What a client keeps between runs."""

    session: str
    #: Larger than that of every connection that was opened.
    generation: int = 0
    #: What the application has handled, by interest id; the latest change is last.
    positions: dict[str, Position] = field(default_factory=dict[str, Position])

    def to_map(self) -> dict[str, Any]:
        """Return the state as JSON can write it."""
        positions = {
            id_: {"epoch": f"{each.epoch:016x}", "offset": each.offset} for id_, each in self.positions.items()
        }
        return {"session": self.session, "generation": self.generation, "positions": positions}


async def load_state(storage: Storage) -> SavedState | None:
    """Return what a storage has. Raises StorageError, and what ``load`` raises."""
    loaded = storage.load()
    state = await loaded if isawaitable(loaded) else loaded
    if state is None:
        return None
    try:
        return _read_state(state)
    except Exception as error:
        raise StorageError(f"the storage has no state of a client: {error}") from error


@parser("the state of a client")
def _read_state(state: dict[str, Any]) -> SavedState:
    positions: dict[str, Position] = {}
    for id_, value in read_text_map(state["positions"]).items():
        position = read_text_map(value)
        positions[id_] = Position(
            int(read_text(position["epoch"], 16), 16), read_natural(position["offset"], EXACT_MAX)
        )
    return SavedState(read_text(state["session"], 64), read_natural(state["generation"], EXACT_MAX), positions)


class Saver:
    """Saves a state after it was changed, at most every ``SAVE_S``, and at the end.

    Args:
        storage: None: nothing is saved.
        state: what is saved; changed by the methods only.
        on_error: called with what ``save`` raises. It is tried again.

    """

    def __init__(self, storage: Storage | None, state: SavedState, on_error: Callable[[Exception], None]) -> None:
        self._storage = storage
        self.state = state
        self._on_error = on_error
        self._is_changed = asyncio.Event()
        self._is_closing = asyncio.Event()
        self._task = None if storage is None else asyncio.create_task(self._run(storage), name="dynamoth user: saver")

    def set_position(self, interest_id: str, position: Position) -> None:
        """Keep a position."""
        positions = self.state.positions
        positions.pop(interest_id, None)
        positions[interest_id] = position
        if len(positions) > POSITIONS_MAX:
            del positions[next(iter(positions))]
        self._is_changed.set()

    def forget(self, interest_id: str) -> None:
        """Drop a position."""
        if self.state.positions.pop(interest_id, None) is not None:
            self._is_changed.set()

    def set_generation(self, generation: int) -> None:
        """Keep the number of the latest connection."""
        self.state.generation = generation
        self._is_changed.set()

    async def close(self) -> None:
        """Save the last changes, and end."""
        self._is_closing.set()
        self._is_changed.set()
        if self._task is not None:
            await self._task

    async def _run(self, storage: Storage) -> None:
        while not self._is_closing.is_set():
            await self._is_changed.wait()
            self._is_changed.clear()
            await self._save(storage)
            try:
                async with asyncio.timeout(SAVE_S):
                    await self._is_closing.wait()
            except TimeoutError:
                continue
        if self._is_changed.is_set():
            await self._save(storage)

    async def _save(self, storage: Storage) -> None:
        try:
            saved = storage.save(self.state.to_map())
            if isawaitable(saved):
                await saved
        except Exception as error:
            _log.exception("the positions of session %s could not be saved", self.state.session)
            self._is_changed.set()
            self._on_error(error)
