"""Follows channels of an edge broker in a terminal.

    python examples/edge/follow.py --url ws://localhost:8080/connect --state follow.json news sports

It begins where the last run with the same state file has ended. ``--say TEXT`` publishes on the first channel.
"""

# ruff: noqa: T201 - a terminal is where this script writes

from __future__ import annotations

import argparse
import asyncio
from contextlib import suppress

from dynamoth_user import Client, Failed, FileStorage, Gap, Interrupted, Item, Served


def show_state(state: Served | Interrupted | Failed) -> None:
    """Print which broker serves us."""
    match state:
        case Served(broker, url, moved):
            print(f"-- {'moved to' if moved else 'served by'} {broker} at {url}")
        case Interrupted(reason, retry_s):
            print(f"-- interrupted: {reason}; next attempt in {retry_s:.1f} s")
        case Failed(code, reason):
            print(f"-- ended with {code}: {reason}")


async def show(item: Item | Gap) -> None:
    """Print an item. When this returns, the item counts as handled."""
    if isinstance(item, Gap):
        print(f"{item.interest.name}: publications are missing: {item.reason}")
    else:
        place = "" if item.position is None else f" {item.position.offset}"
        print(f"{item.interest.name}{place}: {item.data.decode(errors='replace')}")


async def main() -> None:
    """Subscribe, and print until the client has ended."""
    parser = argparse.ArgumentParser(description="Follows channels of an edge broker.")
    parser.add_argument("channels", nargs="+")
    parser.add_argument("--url", action="append", required=True, help="of a broker; may be given several times")
    parser.add_argument("--token")
    parser.add_argument("--state", help="a file for the session and the positions")
    parser.add_argument("--say", metavar="TEXT")
    options = parser.parse_args()
    storage = None if options.state is None else FileStorage(options.state)
    async with Client(options.url, token=options.token, storage=storage, on_state=show_state) as client:
        for channel in options.channels[1:]:
            await client.subscribe(channel, show)
        first = await client.subscribe(options.channels[0])
        if options.say is not None:
            await client.publish(options.channels[0], options.say)
        async for item in first:
            await show(item)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
