"""Writes files and folders that are on disk when a function returns: a power failure later does not take them away."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_text(path: Path, text: str) -> None:
    """Write a small file, which appears as a whole or not at all, and is on disk then. Raises OSError."""
    with replacing(path, path.with_name(f".{path.name}.tmp")) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path, hidden: Path, check: Callable[[], None] = lambda: None) -> Generator[BinaryIO]:
    """Yield a hidden file that replaces ``path`` at the end, and is on disk then. Raises OSError.

    It is deleted if that fails, or if ``check`` raises, which is called right before.
    """
    try:
        with hidden.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check()
        hidden.rename(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    sync(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents where they are missing; the names of new ones are on disk then. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    try:
        sync(folder.parent)
    except OSError:
        folder.rmdir()  # the next call makes it again
        raise


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
