"""Reads the settings that a what-if compares: a TOML file with values, lists and ranges.

Each key is a setting of the balancer. A value is one value, a list of them, or a range ``{ from = 0.6, to = 0.9, step =
0.1 }`` with both ends. All combinations are tried. Tables ``[[grid]]`` are grids of their own, so that only some
combinations are tried.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any, cast

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import Declared, one_of, to_text
from dynamoth.settings.sections import PlanningSettings
from dynamoth_balancer.options import BalancerOptions

COMBINATIONS_MAX = 10_000
"""Most combinations of one grid: some hours of a machine's time."""

NUMBER_MAX = 10**15
"""Bound of the numbers of a range: no setting takes larger numbers."""

PROBLEMS_SHOWN_MAX = 20

_NO_DECISIONS = (
    *("standby", "lease_s", "agent_stale_s", "server_dead_s"),
    *("cpu_ratio_max", "memory_bytes_max", "full_ratio"),
)
"""Settings for balancers that fail or wait, and for resources other than outgoing bytes: a replay has none of them."""

_OPTIONS = (
    "load_ratio_accept",
    "much_better_ratio",
    "improvement_ratio_min",
    "channel_ratio_min",
    "reports_min",
    "decision_interval_s",
)
"""Options that no user needs to set, and that a grid may change."""

_RANGE = {"from", "to", "step"}


@dataclass(frozen=True, slots=True)
class Combination:
    """Settings to try: what differs from the settings in force, by name, and the options that result."""

    changes: Mapping[str, Any]
    options: BalancerOptions

    @property
    def text(self) -> str:
        """The combination as TOML, in one line."""
        return ", ".join(f"{name} = {to_text(value)}" for name, value in self.changes.items()) or "as in force"


def known_settings() -> dict[str, Declared]:
    """Return the settings that a grid may change, by name."""
    names = [item.name for item in fields(PlanningSettings) if item.name not in _NO_DECISIONS]
    declared = {item.name: item for item in fields(BalancerOptions)}
    defaults = {"load_ratio_accept": PlanningSettings().load_ratio_safe}
    return {
        name: Declared("grid", name, defaults.get(name, declared[name].default), declared[name].metadata["setting"])
        for name in (*names, *_OPTIONS)
    }


def read_grid(text: str, name: str, in_force: BalancerOptions, *, related: bool = True) -> list[Combination]:
    """Return all combinations, the settings in force first.

    Args:
        text: of the file.
        name: of the file, for messages.
        in_force: the settings in force; they apply to all that the grid does not name.
        related: whether to check the grid against the settings in force, too. False while these are not known.

    Raises:
        ConfigError: the file cannot be used. The text names everything that is wrong in it.

    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of numbers with thousands of digits, too
        raise ConfigError(f"{name} is not TOML: {error}") from error
    given: object = document.pop("grid", [])
    several: list[Any] = [*given] if isinstance(given, list) else [given]
    problems: list[str] = []
    if not all(isinstance(each, dict) for each in several):
        problems.append("grid: tables [[grid]] expected")
        several = []
    grids = [each for each in (document, *cast("list[dict[str, Any]]", several)) if each]
    if not grids and not problems:
        problems.append("it names no setting: add a line such as load_ratio_high = [0.7, 0.8]")
    axes = [_axes(grid, problems) for grid in grids]
    _refuse(name, problems)
    if (size := sum(prod(map(len, each.values())) for each in axes)) > COMBINATIONS_MAX:
        limit = f"at most {COMBINATIONS_MAX} are compared"
        raise ConfigError(f"{name} has {size} combinations, and {limit}: take fewer values")
    combinations = list(_combinations(axes, in_force, problems, related=related))
    _refuse(name, problems)
    return [Combination({}, in_force), *combinations]


def _refuse(name: str, problems: Sequence[str]) -> None:
    if problems:
        shown = list(dict.fromkeys(problems))
        more = f"; and {len(shown) - PROBLEMS_SHOWN_MAX} more" if len(shown) > PROBLEMS_SHOWN_MAX else ""
        raise ConfigError(f"{name}: {'; '.join(shown[:PROBLEMS_SHOWN_MAX])}{more}")


def _axes(grid: Mapping[str, Any], problems: list[str]) -> dict[str, list[Any]]:
    """Return the values of each setting."""
    known = known_settings()
    axes: dict[str, list[Any]] = {}
    for name, given in grid.items():
        if name not in known:
            problems.append(f"{name} is no setting that a grid can change: {one_of(name, known)}")
            continue
        values: list[Any] = []
        for value in _values(name, given, problems):
            try:
                values.append(known[name].parse(value, "the grid"))
            except ConfigError:
                problems.append(f"{name}: {known[name].accepted} expected, not {value!r:.80}")
        if not values and given == []:
            problems.append(f"{name}: the list is empty")
        axes[name] = list(dict.fromkeys(values))
    return axes


def _values(name: str, given: Any, problems: list[str]) -> Sequence[Any]:
    if isinstance(given, list):
        values: list[Any] = [*given]
        return values
    if not isinstance(given, dict):
        return [given]
    ends = cast("dict[str, Any]", given)
    numbers = [ends.get(key) for key in ("from", "to", "step")]
    if set(ends) != _RANGE or not all(isinstance(each, int | float) for each in numbers):
        problems.append(f"{name}: a range {{ from = 0.6, to = 0.9, step = 0.1 }} expected, not {_toml(ends)}")
        return []
    first, last, step = cast("list[float]", numbers)
    if (
        not all(abs(each) <= NUMBER_MAX for each in numbers if each is not None)
        or not step > 0
        or not first <= last
        or (last - first) / step >= COMBINATIONS_MAX
    ):
        problems.append(
            f"{name}: a range goes up from its first to its last value, in fewer than {COMBINATIONS_MAX} steps:"
            f" not {_toml(ends)}"
        )
        return []
    count = int((last - first) / step + 1e-9) + 1
    whole = all(isinstance(each, int) for each in numbers)
    return [first + index * step if whole else round(first + index * step, 9) for index in range(count)]


def _toml(given: Mapping[str, Any]) -> str:
    text = ", ".join(f"{key} = {value!r}" for key, value in given.items())
    return f"{{ {text:.80} }}"


def _combinations(
    axes: Sequence[Mapping[str, Sequence[Any]]], in_force: BalancerOptions, problems: list[str], *, related: bool
) -> Iterator[Combination]:
    seen: set[BalancerOptions] = {in_force}
    for each in axes:
        for values in product(*each.values()):
            changes = dict(zip(each, values, strict=True))
            options = replace(in_force, **changes)
            if options.load_ratio_safe > options.load_ratio_high:
                if related or {"load_ratio_safe", "load_ratio_high"} <= changes.keys():
                    problems.append(
                        f"load_ratio_safe = {options.load_ratio_safe:g} is above"
                        f" load_ratio_high = {options.load_ratio_high:g}: leave it out with tables [[grid]]"
                    )
            elif options not in seen:
                seen.add(options)
                yield Combination(changes, options)
