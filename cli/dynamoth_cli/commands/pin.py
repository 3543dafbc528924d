"""``dynamoth pin``: moves a channel to a server, and keeps it there until ``dynamoth unpin``."""

from __future__ import annotations

import argparse

from dynamoth_cli.commands.plan import add_change_arguments, change_channel


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Move a channel to a server, without losing a message, and keep it there until 'dynamoth unpin', however busy"
        " it is; also after a restart of the balancer. Waits until the move has settled."
    )
    add_change_arguments(parser)
    parser.add_argument("to", metavar="SERVER", help="id of the server, as 'plan show' lists them")


def run(arguments: argparse.Namespace) -> int:
    """Pin the channel. Raises RequestRefused where the balancer refuses."""
    return change_channel(arguments, "pin")
