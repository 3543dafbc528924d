"""Reads the settings that a what-if compares: a TOML file with values, lists and ranges.

Each key is a setting of the balancer; ``coordinator.cov_max`` and its like are settings of the coordinator of edge
brokers. The two are compared apart from each other, as neither depends on the other.

A value is one value, a list of them, or a range ``{ from = 0.6, to = 0.9, step = 0.1 }`` with both ends. All
combinations are tried. Tables ``[[grid]]`` are grids of their own, so that only some combinations are tried.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any, Generic, TypeVar, cast

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import Declared, one_of, to_text
from dynamoth.settings.sections import MigrationSettings, PlanningSettings
from dynamoth_balancer.options import BalancerOptions
from dynamoth_broker.coordinator.settings import CoordinatorOptions

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

COORDINATOR = "coordinator"
"""The table of a grid with settings of the coordinator."""

_NOT_OF_COORDINATOR = (
    *("dry_run", "report_s", "suspect_reports", "ask_timeout_s", "batch_timeout_s"),
    *("fast_half_life_s", "appear_s"),
)
"""Settings for brokers that fail or answer late, and for the placement of newcomers: a replay has none of them."""

_RELATED = (
    ("cov_target", "cov_max", False),
    ("cov_max", "shuffle_cov_min", True),
    ("ratio_mean_min", "shuffle_ratio_mean_min", False),
)
"""Settings of the coordinator of which the first must not be above the second, or (True) must be below it."""

_RANGE = {"from", "to", "step"}

Options = TypeVar("Options", BalancerOptions, CoordinatorOptions)


@dataclass(frozen=True, slots=True)
class Combination(Generic[Options]):
    """Settings to try: what differs from the settings in force, by name, and the options that result."""

    changes: Mapping[str, Any]
    options: Options

    @property
    def text(self) -> str:
        """The combination as TOML, in one line."""
        return ", ".join(f"{name} = {to_text(value)}" for name, value in self.changes.items()) or "as in force"


def known_settings() -> dict[str, Declared]:
    """Return the settings of the balancer that a grid may change, by name."""
    names = [item.name for item in fields(PlanningSettings) if item.name not in _NO_DECISIONS]
    declared = {item.name: item for item in fields(BalancerOptions)}
    defaults = {"load_ratio_accept": PlanningSettings().load_ratio_safe}
    return {
        name: Declared("grid", name, defaults.get(name, declared[name].default), declared[name].metadata["setting"])
        for name in (*names, *_OPTIONS)
    }


def known_coordinator_settings() -> dict[str, Declared]:
    """Return the settings of the coordinator that a grid may change, by name, without ``coordinator.``."""
    known = [item for item in fields(MigrationSettings) if item.name not in _NOT_OF_COORDINATOR]
    return {item.name: Declared(COORDINATOR, item.name, item.default, item.metadata["setting"]) for item in known}


def read_grid(
    text: str, name: str, in_force: BalancerOptions, *, related: bool = True
) -> list[Combination[BalancerOptions]]:
    """Return all combinations of settings of the balancer, the settings in force first.

    Args:
        text: of the file.
        name: of the file, for messages.
        in_force: the settings in force; they apply to all that the grid does not name.
        related: whether to check the grid against the settings in force, too. False while these are not known.

    Raises:
        ConfigError: the file cannot be used. The text names everything that is wrong in it.

    """
    axes, _ = _read_axes(text, name)
    problems: list[str] = []
    combinations = list(_combinations(axes, in_force, problems, related=related))
    _refuse(name, problems)
    return [Combination({}, in_force), *combinations]


def read_coordinator_grid(
    text: str, name: str, in_force: CoordinatorOptions, *, related: bool = True
) -> list[Combination[CoordinatorOptions]]:
    """Return all combinations of settings of the coordinator, the settings in force first.

    Arguments and errors are those of :func:`read_grid`.
    """
    _, axes = _read_axes(text, name)
    problems: list[str] = []
    combinations = list(_coordinator_combinations(axes, in_force, problems, related=related))
    _refuse(name, problems)
    return [Combination({}, in_force), *combinations]


def names_balancer(text: str, name: str) -> bool:
    """Return whether a grid has settings of the balancer. Raises ConfigError."""
    return bool(_read_axes(text, name)[0])


def names_coordinator(text: str, name: str) -> bool:
    """Return whether a grid has settings of the coordinator. Raises ConfigError."""
    return bool(_read_axes(text, name)[1])


_AllAxes = list[dict[str, list[Any]]]
"""The values of each setting, of each grid."""


def _read_axes(text: str, name: str) -> tuple[_AllAxes, _AllAxes]:
    """Return what a file says of the balancer, and what of the coordinator. Raises ConfigError."""
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
    grids: list[dict[str, Any]] = [document, *several]
    others: list[Any] = [each.pop(COORDINATOR) for each in grids if COORDINATOR in each]
    if not all(isinstance(each, dict) for each in others):
        problems.append(f"{COORDINATOR}: settings such as {COORDINATOR}.cov_max = [0.1, 0.2] expected")
        others = []
    if not any(grids) and not any(others) and not problems:
        problems.append("it names no setting: add a line such as load_ratio_high = [0.7, 0.8]")
    axes = [_axes(each, known_settings(), "", problems) for each in grids if each]
    other_axes = [_axes(each, known_coordinator_settings(), f"{COORDINATOR}.", problems) for each in others if each]
    _refuse(name, problems)
    for some in (axes, other_axes):
        if (size := sum(prod(map(len, each.values())) for each in some)) > COMBINATIONS_MAX:
            limit = f"at most {COMBINATIONS_MAX} are compared"
            raise ConfigError(f"{name} has {size} combinations, and {limit}: take fewer values")
    return axes, other_axes


def _refuse(name: str, problems: Sequence[str]) -> None:
    if problems:
        shown = list(dict.fromkeys(problems))
        more = f"; and {len(shown) - PROBLEMS_SHOWN_MAX} more" if len(shown) > PROBLEMS_SHOWN_MAX else ""
        raise ConfigError(f"{name}: {'; '.join(shown[:PROBLEMS_SHOWN_MAX])}{more}")


def _axes(
    grid: Mapping[str, Any], known: Mapping[str, Declared], prefix: str, problems: list[str]
) -> dict[str, list[Any]]:
    """Return the values of each setting. ``prefix``: of its name in the file."""
    axes: dict[str, list[Any]] = {}
    for name, given in grid.items():
        shown = f"{prefix}{name}"
        if name not in known:
            names = [f"{prefix}{each}" for each in known]
            problems.append(f"{shown} is no setting that a grid can change: {one_of(shown, names)}")
            continue
        values: list[Any] = []
        for value in _values(shown, given, problems):
            try:
                values.append(known[name].parse(value, "the grid"))
            except ConfigError:
                problems.append(f"{shown}: {known[name].accepted} expected, not {value!r:.80}")
        if not values and given == []:
            problems.append(f"{shown}: the list is empty")
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
) -> Iterator[Combination[BalancerOptions]]:
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


def _coordinator_combinations(
    axes: Sequence[Mapping[str, Sequence[Any]]], in_force: CoordinatorOptions, problems: list[str], *, related: bool
) -> Iterator[Combination[CoordinatorOptions]]:
    seen: set[CoordinatorOptions] = {in_force}
    for each in axes:
        for values in product(*each.values()):
            changes = dict(zip(each, values, strict=True))
            if wrong := _unrelated(changes, in_force, related=related):
                problems += wrong
            elif related and (options := replace(in_force, **changes)) not in seen:
                seen.add(options)
                yield Combination({f"{COORDINATOR}.{name}": value for name, value in changes.items()}, options)


def _unrelated(changes: Mapping[str, Any], in_force: CoordinatorOptions, *, related: bool) -> list[str]:
    """Return which of the settings that limit each other do not fit together."""
    found: list[str] = []
    for low, high, is_strict in _RELATED:
        if not ({low, high} & changes.keys() if related else {low, high} <= changes.keys()):
            continue
        below, above = (changes.get(name, getattr(in_force, name)) for name in (low, high))
        if below > above or (is_strict and below == above):
            needed = "less than" if is_strict else "at most"
            found.append(
                f"{COORDINATOR}.{low} = {below:g} must be {needed} {COORDINATOR}.{high} = {above:g}: name both in the"
                " grid, and leave out with tables [[grid]] what does not fit"
            )
    return found
