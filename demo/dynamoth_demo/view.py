"""How the demo looks: live in a terminal, or as lines of progress anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dynamoth_demo.festival import Festival
from dynamoth_demo.state import DemoState, HotChannel

BAR_WIDTH = 40
BAR_LOAD_RATIO_MAX = 1.5
"""What a full bar stands for."""

LOAD_RATIO_HIGH = 0.8
LOAD_RATIO_SAFE = 0.6
"""Where bars turn red, and yellow: the balancer's defaults."""

NEWS_SHOWN_MAX = 9
"""Lines of news in a terminal."""

LABELS = {"covered_losses": "lost with a gap event"}
"""Names of what the audit counts, where its own are not plain enough."""

LINE_INTERVAL_S = 5.0
"""Time between two lines of progress."""


class View:
    """Shows the state of the demo. As a context manager, between whose begin and end :meth:`update` is called."""

    def __init__(self, state: DemoState, console: Console) -> None:
        self._state = state
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        #: What the latest line of progress was about.
        self._said: tuple[str, int] | None = None
        #: How many news have been printed.
        self._news_printed = 0

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *of_exception: object) -> None:
        if self._live is not None:
            self.update()
            self._live.stop()

    def update(self) -> None:
        """Show how things are now."""
        if self._live is not None:
            self._live.update(render(self._state), refresh=True)
            return
        about = self._state.stage, int(self._state.elapsed_s / LINE_INTERVAL_S)
        if about != self._said:
            self._said = about
            self._console.print(progress_line(self._state), highlight=False, soft_wrap=True)
        self._print_news()

    def _print_news(self) -> None:
        """Print a line for each of the news since the last time, as far as they are kept."""
        new = min(self._state.news_count - self._news_printed, len(self._state.news))
        self._news_printed = self._state.news_count
        for news in list(self._state.news)[len(self._state.news) - new :]:
            self._console.print(f"       {news}", markup=False, highlight=False, soft_wrap=True)


def render(state: DemoState) -> Panel:
    """Return everything, for a terminal."""
    time = f"{state.elapsed_s:.0f} of {state.seconds:.0f} s" if state.elapsed_s else ""
    return Panel(
        Group(_servers(state), "", *map(partial(_hot, state), state.hot_channels()), _numbers(state), "", _news(state)),
        title=f"[bold]Dynamoth[/]  {state.stage}  {time}",
        title_align="left",
        box=box.ROUNDED,
    )


def _servers(state: DemoState) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, justify in (("server", "left"), ("load ratio", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # a Literal, which the tuple hides
    for name in ("tiles", "messages/s", "MB/s"):
        table.add_column(name, justify="right")
    tiles = state.channels_at()
    for id_ in state.servers:
        if id_ == state.killed:
            table.add_row(id_, Text("killed", "bold red"), "", str(tiles[id_]), "", "")
            continue
        ratio = state.load_ratios.get(id_)
        figures: Mapping[str, Any] = state.balancer["servers"].get(id_, {}) if state.balancer else {}
        colour = _colour(ratio)
        shown = min(ratio or 0.0, BAR_LOAD_RATIO_MAX)
        bar = ProgressBar(BAR_LOAD_RATIO_MAX, shown, BAR_WIDTH, complete_style=colour, finished_style=colour)
        table.add_row(
            id_,
            Text("-" if ratio is None else f"{ratio:.2f}", colour),
            bar,
            str(tiles[id_]),
            f"{figures.get('messages_per_s', 0):,.0f}",
            f"{figures.get('outgoing_bytes_per_s', 0) / 1e6:.2f}",
        )
    return table


def _colour(ratio: float | None) -> str:
    if ratio is None or ratio <= LOAD_RATIO_SAFE:
        return "green"
    return "red" if ratio > LOAD_RATIO_HIGH else "yellow"


def _hot(state: DemoState, hot: HotChannel) -> Text:
    """Return the line of a channel that is, or may come to be, at several servers."""
    where = f"{hot.mode} at {', '.join(hot.servers)}"
    text = Text.assemble(
        "hot channel ", (hot.name, "bold"), ": ", (where, "bold magenta" if len(hot.servers) > 1 else "")
    )
    if hot.is_changing:
        text.append("  changing now", "yellow")
    if state.festival is not None and state.festival.name == hot.name:
        text.append(f"  {_festival_now(state, state.festival)}", "dim")
    return text


def _festival_now(state: DemoState, festival: Festival) -> str:
    if state.elapsed_s < festival.begins_s:
        return f"quiet until the festival begins, at {festival.begins_s:.0f} s"
    if state.elapsed_s < festival.ends_s:
        return f"{state.rate('performed'):,.0f} publications/s"
    return "quiet, the festival is over"


def _numbers(state: DemoState) -> Text:
    published, delivered = state.rate("published"), state.rate("delivered")
    p50, p99 = (_ms(state.latencies_now.quantile_ms(ratio)) for ratio in (0.5, 0.99))
    version = "-" if state.plan is None else state.plan.version
    found = "  ".join(_found(state, name, count) for name, count in state.audit().items())
    return Text.from_markup(
        f"[bold]{len(state.alive)}[/] servers  [bold]{state.migrations}[/] channels moved  "
        f"[bold]{state.slots_moved}[/] slots moved  [bold]{state.replicated}[/] split  [bold]{state.folded_back}[/]"
        f" folded back  {state.in_transition} changing now  plan version {version}\n"
        f"published {published:,.0f}/s  delivered {delivered:,.0f}/s  latency p50 {p50}  p99 {p99}\n"
        f"audit of {state.audited:,} messages: {found}"
    )


def _found(state: DemoState, name: str, count: int) -> str:
    """Return what the audit has counted of one kind: red if there may be none."""
    colour = "green" if count == 0 else "yellow" if name in state.allowed else "red"
    return f"[bold {colour}]{count}[/] {LABELS.get(name, name)}"


def _news(state: DemoState) -> Text:
    if state.balancer_problem:
        return Text(f"balancer: {state.balancer_problem}", "red")
    lines = list(state.news)[-NEWS_SHOWN_MAX:] or ["the balancer has had nothing to decide yet"]
    return Text("\n".join(lines), "dim", no_wrap=True, overflow="ellipsis")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def progress_line(state: DemoState) -> str:
    """Return one line, for logs."""
    ratios = " ".join(f"{id_}={_load(state, id_)}" for id_ in state.servers)
    audit = " ".join(f"{name}={count}" for name, count in state.audit().items())
    published, delivered = state.rate("published"), state.rate("delivered")
    p99 = _ms(state.latencies_now.quantile_ms(0.99))
    hot = "".join(
        f" {each.name} {each.mode} at {','.join(each.servers)};"
        for each in state.hot_channels()
        if len(each.servers) > 1
    )
    return (
        f"{state.elapsed_s:4.0f} s  {state.stage}: load {ratios}; moved {state.migrations};{hot}"
        f" published {published:.0f}/s delivered {delivered:.0f}/s p99 {p99}; audited {state.audited} {audit}"
    )


def _load(state: DemoState, server: str) -> str:
    """Return the load ratio of a server, for logs."""
    ratio = state.load_ratios.get(server)
    return "killed" if server == state.killed else "-" if ratio is None else f"{ratio:.2f}"


def show_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print the result."""
    before, after = (_ratios(summary[key]) for key in ("load_ratios_before", "load_ratios_after"))
    verdict = "[bold green]clean[/]" if summary["clean"] else f"[bold red]NOT clean: {', '.join(summary['faults'])}[/]"
    irregular = ", ".join(f"{summary[name]} {name}" for name in ("lost", "duplicated", "reordered", "gaps"))
    if "covered_losses" in summary:
        irregular += f", {summary['covered_losses']} lost with a gap event"
    lines = [
        f"published {summary['published']:,}; delivered {summary['delivered']:,}, {summary['audited']:,} audited",
        f"audit: {verdict} ({irregular})",
        f"channels moved: {summary['migrations']}, slots: {summary['slots_moved']} (plan version"
        f" {summary['plan_version']})",
        _replication(summary),
        f"latency: p50 {_ms(summary['latency_ms_p50'])}, p99 {_ms(summary['latency_ms_p99'])}",
        f"load ratios before the first move: {before}; in the end: {after}",
    ]
    if "covered_losses" in summary:
        lines.append(_elasticity(summary))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for story in summary["stories"]:
        console.print(story, markup=False, highlight=False, soft_wrap=True)


def _elasticity(summary: Mapping[str, Any]) -> str:
    """Return how the servers came and went."""
    killed, served_s, server_seconds = (summary[name] for name in ("killed", "served_s", "server_seconds"))
    text = (
        f"servers: {summary['servers']} at first, up to {summary['servers_at_most']} under load,"
        f" {summary['servers_in_the_end']} in the end"
    )
    if server_seconds is not None:
        text += f" ({server_seconds:.0f} server-seconds)"
    if killed is not None:
        served = (
            "others never served its channels"
            if served_s is None
            else f"others served its channels {served_s:.1f} s later"
        )
        text += f"; {killed} was killed, {served}; {summary['publishes_failed']} publishes raised an error"
    return text


def _replication(summary: Mapping[str, Any]) -> str:
    """Return what became of the festival's channel, also when nothing did."""
    name, times = summary["festival"], summary["replicated"]
    if not times:
        if name is None:
            return "channels split: none; with one server there is nothing to spread, so there was no festival"
        return f"channels split: none; {name} was too short, or this machine too busy, for the balancer to see it"
    changed = f" (changed meanwhile: {summary['replicas_changed']})" if summary["replicas_changed"] else ""
    folded_back = str(summary["folded_back"])
    if summary["folded_back"] < times:
        folded_back += ", as the demo was over too soon"
    return f"channels split: {times}, over up to {summary['replicas_max']} servers{changed}; folded back: {folded_back}"


def _ratios(ratios: Mapping[str, float | None] | None) -> str:
    if ratios is None:
        return "not measured"
    return ", ".join(f"{id_} {'-' if ratio is None else format(ratio, '.2f')}" for id_, ratio in ratios.items())
