"""The one command, ``dynamoth``.

Each subcommand is a module of its own, with ``configure(parser)`` and ``run(arguments) -> int``. Only the module of
the command that was asked for is imported, so that ``dynamoth --help`` and a typo are answered at once.

Exit codes are in ``dynamoth_daemon.exit_codes``. ``agent``, ``balancer`` and ``up`` run until SIGINT or SIGTERM, and
then exit with 0.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from dynamoth_cli.arguments import CommandParser
from dynamoth_cli.extras import what_is_missing
from dynamoth_daemon.exit_codes import EXIT_CODES, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED


class CommandModule(Protocol):
    """The interface of a subcommand's module."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Execute the command. Returns the exit code."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its module, and what it does."""

    module: str
    summary: str
    #: The extra of the distribution that it needs; none where the requirements of the client are enough.
    extra: str | None = None


COMMANDS = {
    "demo": Command(
        "dynamoth_demo.command", "see channels move under load, on Redis servers that it starts itself", "cli"
    ),
    "demo-brokers": Command(
        "dynamoth_demo.brokers.command", "see users move between edge brokers that are drained and killed", "demo"
    ),
    "demo-emergency": Command(
        "dynamoth_demo.emergency.command", "see users get reports near them, computed by Spark, audited", "emergency"
    ),
    "up": Command("dynamoth_cli.commands.up", "start a whole cluster on this machine, for development", "cli"),
    "agent": Command("dynamoth_cli.commands.agent", "run the agent of one Redis server", "agent"),
    "balancer": Command("dynamoth_cli.commands.balancer", "run the balancer of a cluster", "balancer"),
    "broker": Command(
        "dynamoth_cli.commands.broker", "run an edge broker, which serves end users; drain one, move a user", "broker"
    ),
    "coordinator": Command(
        "dynamoth_cli.commands.coordinator", "run the coordinator, which moves users between brokers by load", "broker"
    ),
    "status": Command("dynamoth_cli.commands.status", "show servers, agents, load and balancer", "cli"),
    "plan": Command("dynamoth_cli.commands.plan", "show, move and replicate channels; compatibility rules"),
    "explain": Command("dynamoth_cli.commands.explain", "why a channel is where it is, and what a server carries"),
    "rebalance": Command("dynamoth_cli.commands.rebalance", "show what the balancer would do now, or make it do so"),
    "pause": Command("dynamoth_cli.commands.pause", "stop the balancer from making plans of its own"),
    "resume": Command("dynamoth_cli.commands.resume", "let the balancer make plans again"),
    "pin": Command("dynamoth_cli.commands.pin", "move a channel to a server, and keep it there"),
    "unpin": Command("dynamoth_cli.commands.unpin", "let the balancer move a channel again"),
    "server": Command("dynamoth_cli.commands.server", "list the servers; add one, drain one, remove one"),
    "acl": Command(
        "dynamoth_cli.commands.acl", "print Redis users with the rights of agents, balancer, clients and operators"
    ),
    "record": Command("dynamoth_cli.commands.record", "record what happens in a cluster, as Parquet files", "record"),
    "report": Command("dynamoth_analytics.report", "explain a recording: tables, and a page to read", "analytics"),
    "what-if": Command("dynamoth_analytics.what_if", "replay a recording under other settings", "analytics"),
    "dataset": Command("dynamoth_cli.commands.dataset", "register datasets, load records, show what was refused"),
    "query": Command("dynamoth_cli.commands.query", "register standing queries, try them, show how they do"),
    "data-cluster": Command(
        "dynamoth_cli.commands.data_cluster", "run the data cluster, which executes standing queries", "analytics"
    ),
    "sim": Command("dynamoth_cli.commands.sim", "try thousands of interleavings and faults in the simulator"),
}

OUTPUT_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""What the system says where the output goes to a full or broken disk."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    try:
        try:
            return _main(argv)
        finally:  # also when argparse has printed its help, and exits
            if sys.stdout is not None:  # as it is where the descriptor was closed
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone
        _drop_output()
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in OUTPUT_FAULTS:
            raise
        _drop_output()
        return _fail(f"the output cannot be written: {os.strerror(error.errno)}: see where it goes", EXIT_FAILED)


def _drop_output() -> None:
    """Drop the output that is still to be written: Python would complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return EXIT_DONE if arguments else EXIT_REFUSED
    name = arguments[0]
    if name in ("-V", "--version"):
        from importlib.metadata import version

        sys.stdout.write(f"dynamoth {version('dynamoth')}\n")
        return EXIT_DONE
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        return _fail(f"{name!r} is no command: {hint}", EXIT_REFUSED)
    return _run(name, arguments[1:])


def _run(name: str, rest: list[str]) -> int:
    from dynamoth.errors import ConfigError, DynamothError

    command = COMMANDS[name]
    if command.extra and (missing := what_is_missing(command.extra)):
        return _fail(f"`dynamoth {name}` needs {missing}", EXIT_REFUSED)
    try:
        module = cast(CommandModule, import_module(command.module))
        parser = CommandParser(
            prog=f"dynamoth {name}",
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=EXIT_CODES,
            allow_abbrev=False,
        )
        module.configure(parser)
        return module.run(parser.parse_args(rest))
    except ConfigError as error:
        return _fail(f"configuration: {error}", EXIT_REFUSED)
    except DynamothError as error:
        return _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)


def _fail(message: str, code: int) -> int:
    from dynamoth.errors import printable

    sys.stderr.write(f"dynamoth: {printable(message)}\n")
    return code


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: dynamoth COMMAND [options]\n\n"
        "Several unmodified Redis servers as one very large publish/subscribe server.\n\n"
        f"commands:\n{commands}\n\n"
        "'dynamoth COMMAND --help' lists the options of a command. Daemons take each setting from the first of: flag,\n"
        f"environment (DYNAMOTH_...), TOML file (--config), default.\n\n{EXIT_CODES}\n"
    )
