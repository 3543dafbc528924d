"""``dynamoth resume``: ends ``dynamoth pause``."""

from __future__ import annotations

import argparse

from dynamoth_cli.commands.orders import add_order, give_order


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = "Let the balancer make plans again, after 'dynamoth pause'."
    add_order(parser)


def run(arguments: argparse.Namespace) -> int:
    """Resume the balancer. Raises RequestRefused where that is not stored."""
    return give_order(arguments, "resume", {}, lambda _: "the balancer makes plans")
