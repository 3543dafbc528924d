"""Programs with clients, each a process of its own, whose messages are judged together."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_sim.audit import Audit, Totals
from tests.whole.harness import PUBLISH_S_MAX, until


@dataclass(frozen=True, slots=True)
class How:
    """How a program is run: with which environment, and with which words before its command."""

    environment: Mapping[str, str] = field(default_factory=environment_without_settings)
    before: Sequence[str] = ()


class Programs:
    """Programs that publish on the same channels and listen to them, and the judgement of all.

    Args:
        url: of the cluster.
        channels: every program publishes to each, and is subscribed to each.
        how: the programs by name.
        losses_allowed: whether what a gap event covers may be lost, until ``calm`` is called.
        publish_s_max: no publish may take longer (G4).

    """

    def __init__(
        self,
        url: str,
        channels: Sequence[bytes],
        how: Mapping[str, How],
        *,
        losses_allowed: bool = False,
        publish_s_max: float = PUBLISH_S_MAX,
    ) -> None:
        self._channels = [channel.decode() for channel in channels]
        self._losses_allowed = losses_allowed
        self._publish_s_max = publish_s_max
        self._events: dict[str, list[list[Any]]] = defaultdict(list)
        #: The latest numbers: published by (program, channel), and delivered by (program, publisher, channel).
        self._begun: dict[tuple[str, str], int] = {}
        self._latest: dict[tuple[str, str, str], int] = {}
        #: The programs that publish no more.
        self._stopped: set[str] = set()
        program = [sys.executable, "-P", str(Path(__file__).with_name("audited_client.py")), url]
        self._programs = {
            name: Child(
                f"the client {name}",
                [*each.before, *program, name, *self._channels],
                environment=each.environment,
                on_line=lambda line, name=name: self._on_line(name, line),  # type: ignore[misc]
            )
            for name, each in how.items()
        }

    def __enter__(self) -> Self:
        for program in self._programs.values():
            program.start()
        self.flow()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self._programs.values():
            program.stop()

    def _on_line(self, name: str, line: str) -> None:
        if not line.startswith("["):
            return  # a log, which an error shows
        event = json.loads(line)
        self._events[name].append(event)
        kind, channel, _, *values = event
        if kind == "stopped":
            self._stopped.add(name)
        elif kind == "published":
            self._begun[name, channel] = values[0]
        elif kind == "delivered":
            self._latest[name, values[0], channel] = values[1]

    def _has_come(self, wanted: Mapping[tuple[str, str], int], names: Collection[str]) -> bool:
        for program in self._programs.values():
            if program.ended_by_itself:
                raise program.failure()
        return all(self._latest.get((name, *key), 0) >= wanted[key] for name in names for key in wanted)

    def flow(self, names: Collection[str] | None = None, channels: Collection[bytes] | None = None) -> None:
        """Wait until what each program publishes from now on comes to each; without names or channels, all of them."""
        names = self._programs.keys() if names is None else names
        texts = self._channels if channels is None else [channel.decode() for channel in channels]
        keys = [(name, channel) for name in names for channel in texts]
        wanted = {key: self._begun.get(key, 0) + 1 for key in keys}
        until(lambda: self._has_come(wanted, names), f"messages on {texts} flow among {[*names]}")

    def calm(self) -> None:
        """From now on nothing fails any more."""
        self._events["the test"].append(["calm", "", time.monotonic()])

    def finish(self) -> Totals:
        """Stop publishing, wait for what is under way, and judge."""
        for program in self._programs.values():
            program.ask_to_end()
        until(lambda: self._stopped == self._programs.keys(), "publishers stop")
        until(lambda: self._has_come(self._begun, self._programs.keys()), "the last messages come")
        audit = Audit(losses_allowed=self._losses_allowed, publish_s_max=self._publish_s_max)
        merged = sorted(self._all_events(), key=lambda event: event[1][2])
        for name, (kind, channel, at, *values) in merged:
            if kind == "gap":
                audit.gap(name, channel.encode(), None, None, at)
            elif kind == "calm":
                audit.calm()
            elif kind == "confirmed":
                audit.confirmed(name, channel.encode(), at)
            elif kind == "publish_ended":
                audit.publish_ended(name, channel.encode(), values[0], at, failed=values[1])
            elif kind != "stopped":
                getattr(audit, kind)(name, channel.encode(), *values, at)
        violations = audit.finish(merged[-1][1][2])
        assert not violations, "\n".join(map(str, violations[:10]))
        return audit.totals

    def _all_events(self) -> Iterator[tuple[str, list[Any]]]:
        return ((name, event) for name, events in self._events.items() for event in events)
