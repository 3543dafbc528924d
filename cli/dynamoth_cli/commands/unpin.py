"""``dynamoth unpin``: ends ``dynamoth pin``."""

from __future__ import annotations

import argparse

from dynamoth_cli.commands.orders import add_order, give_order
from dynamoth_cli.commands.plan import channel_argument


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = "Let the balancer move a pinned channel again. It stays where it is until there is a reason."
    parser.add_argument("channel", metavar="CHANNEL", type=channel_argument)
    add_order(parser)


def run(arguments: argparse.Namespace) -> int:
    """Unpin the channel. Raises RequestRefused where it is not pinned."""
    wanted = {"channel": arguments.channel.encode(errors="surrogateescape")}
    return give_order(arguments, "unpin", wanted, lambda result: f"{arguments.channel} is pinned no more")
