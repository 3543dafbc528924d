"""``dynamoth balancer``: the balancer of a cluster. TEMPORARY until dynamoth_balancer.runtime is there."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import signal
from dataclasses import fields
from typing import Any

from dynamoth.events import Start
from dynamoth.logs import configure_logging
from dynamoth_balancer.actions import Note, Stopped, Decided
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions
from dynamoth_cli.settings import add_settings, answer_questions, cluster_servers, link_options, load_settings
from dynamoth_link.driver import Driver


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_settings(parser, "balancer", ("cluster", "link", "balancer", "log"))


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM."""
    loaded = load_settings(arguments)
    servers = cluster_servers(loaded)
    b = loaded.config.balancer
    options = BalancerOptions(**{f.name: getattr(b, f.name) for f in fields(BalancerOptions) if hasattr(b, f.name)})
    if answer_questions(arguments, loaded):
        return 0
    configure_logging(loaded.config.log.level, loaded.config.log.format)
    link = link_options(loaded, client_name=None)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for s in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(s, stop.set)

        def on_action(action: Any) -> None:
            if isinstance(action, Note):
                logging.getLogger("balancer").info(action.message, extra=dict(action.details))
            elif isinstance(action, Stopped):
                stop.set()
            elif isinstance(action, Decided):
                logging.info("%s", action)

        def crash(e: Any) -> None:
            logging.error("%s", e, exc_info=e.__cause__)
            stop.set()

        driver = Driver(BalancerMachine(servers, secrets.randbits(63), options), on_action=on_action, link_options=lambda a: link, on_crash=crash)
        driver.handle(Start())
        await stop.wait()
        await driver.close()

    asyncio.run(main())
    return 0
