"""``dynamoth pause``: stops the balancer from making plans of its own, until ``dynamoth resume``."""

from __future__ import annotations

import argparse

from dynamoth_cli.commands.orders import add_order, give_order


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Stop the balancer from making plans of its own, drains among them, until 'dynamoth resume'; also after a"
        " restart. Moves that have begun settle. 'dynamoth plan' and 'dynamoth rebalance' work as ever."
    )
    add_order(parser)


def run(arguments: argparse.Namespace) -> int:
    """Pause the balancer. Raises RequestRefused where that is not stored."""
    return give_order(arguments, "pause", {}, lambda _: "the balancer is paused")
