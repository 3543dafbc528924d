"""A program: signals strike a client at any moment, again and again. It fails unless the client stays whole.

Run by ``test_sync_threads.py`` as ``python -m tests.client.interrupted URL BASE``, where BASE is the class of what the
signal handler raises: ``Exception``, or ``KeyboardInterrupt``, which little code catches.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from random import Random
from types import FrameType
from typing import Any, NoReturn

import dynamoth_client as redis
from dynamoth_client import PubSub
from tests.client.sync_helpers import Running, confirmed, next_of, until

ROUNDS = 60
"""How often the client is interrupted."""

RANDOM_SEED = 7


class Interrupted(Exception):
    """Raised by the signal handler."""


class InterruptedLikeCtrlC(KeyboardInterrupt):
    """Raised by the signal handler, and caught by few."""


def use(client: redis.Redis, pubsub: PubSub, heard: list[int], first_s: float) -> NoReturn:
    """Publish and read until a signal interrupts it, ``first_s`` from now at the earliest."""
    # Again and again, as Python drops what is raised in a finalizer.
    signal.setitimer(signal.ITIMER_REAL, first_s, 0.05)
    while True:
        client.publish("d", "x")
        message = pubsub.get_message(timeout=0.0005)
        if message is not None:
            heard.append(int(message["data"]))


def main(url: str, interruption: type[BaseException]) -> None:
    """Interrupt the client, and check after each time that it works and at the end that nothing was lost."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Interrupt ``use``, and nothing else: a second signal may come before the timer was stopped."""
        while frame is not None:
            if frame.f_code is use.__code__:
                raise interruption
            frame = frame.f_back

    signal.signal(signal.SIGALRM, interrupt)
    random = Random(RANDOM_SEED)
    interrupted, heard = 0, list[int]()
    threads = set(threading.enumerate())
    stop = threading.Event()
    with redis.from_url(url) as client, client.pubsub(gaps=True) as pubsub, redis.from_url(url) as other:
        confirmed(pubsub, "c")

        def publish() -> int:
            count = 0
            while not stop.wait(0.001):
                other.publish("c", count)
                count += 1
            other.publish("c", count)  # none is interrupted after this one has come
            return count + 1

        publishing = Running(publish)
        for _ in range(ROUNDS):
            try:
                use(client, pubsub, heard, random.uniform(0.0001, 0.005))
            except interruption:
                signal.setitimer(signal.ITIMER_REAL, 0)
                interrupted += 1
            assert client.publish("d", "y") == 0
            assert Running(client.publish, "d", "z").result() == 0
        stop.set()
        published = publishing.result()
        while not heard or heard[-1] != published - 1:
            heard.append(int(next_of(pubsub)["data"]))
    assert interrupted == ROUNDS
    assert heard == sorted(set(heard)), heard
    assert len(heard) >= published - ROUNDS, "one that the reader had taken may go with each interruption"
    until(lambda: threads.issuperset(threading.enumerate()), "all that was interrupted has ended")
    sys.stdout.write(f"{interrupted} rounds, each interrupted\n")


def ignore(unraisable: Any) -> None:
    """Say nothing of interrupted finalizers, as of a socket whose constructor was interrupted."""


if __name__ == "__main__":
    _, url_, base = sys.argv
    sys.unraisablehook = ignore
    main(url_, {"Exception": Interrupted, "KeyboardInterrupt": InterruptedLikeCtrlC}[base])
    gc.collect()  # while what it says is ignored
