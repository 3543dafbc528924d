"""Asks a provisioner for servers beside the event loop's other work, and hands its answers on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import assert_never

from dynamoth_balancer.events import ListServers, ProvisionerAnswered, ProvisionerRequest
from dynamoth_balancer.process.provisioners import Provisioner, ProvisionerFailed
from dynamoth_balancer.provision.fleet import FreeServer, StartServer

_log = logging.getLogger("dynamoth.provisioner")


class Provisioning:
    """Runs the requests to one provisioner, each as a task.

    Args:
        provisioner: what is asked.
        answer_timeout_s: a request that takes longer is cancelled, and has failed.
        on_answer: called with each answer, in the event loop.

    """

    def __init__(
        self, provisioner: Provisioner, answer_timeout_s: float, on_answer: Callable[[ProvisionerAnswered], None]
    ) -> None:
        self._provisioner = provisioner
        self._answer_timeout_s = answer_timeout_s
        self._on_answer = on_answer
        #: The requests under way.
        self._tasks: dict[ProvisionerRequest, asyncio.Task[None]] = {}
        self._servers: Mapping[str, str] = {}

    def request(self, request: ProvisionerRequest) -> None:
        """Begin to ask for something. The same request that is still under way goes on instead."""
        if request not in self._tasks:
            self._tasks[request] = asyncio.create_task(self._run(request), name=f"provisioner: {request}")

    def adopt(self, servers: Mapping[str, str]) -> None:
        """Let the provisioner know the servers of the plan, URLs by id."""
        if servers != self._servers:
            self._servers = dict(servers)
            self._provisioner.adopt(self._servers)

    async def close(self) -> None:
        """End all requests under way, with what they have started."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request: ProvisionerRequest) -> None:
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                answer = await self._ask(request)
        except ProvisionerFailed as error:
            answer = ProvisionerAnswered(request, str(error))
        except TimeoutError:
            reason = f"the provisioner has not answered for {self._answer_timeout_s:g} s"
            answer = ProvisionerAnswered(request, reason)
        except Exception as error:  # a fault of the provisioner's code: the request ends, and may be repeated
            _log.exception("a provisioner has failed in a way that it does not foresee: please report this")
            answer = ProvisionerAnswered(request, f"a fault of the provisioner, see the log: {error!r:.200}")
        finally:
            del self._tasks[request]  # first, as the answer may lead to the same request again
        self._on_answer(answer)

    async def _ask(self, request: ProvisionerRequest) -> ProvisionerAnswered:
        match request:
            case StartServer(id_):
                return ProvisionerAnswered(request, url=await self._provisioner.start(id_))
            case FreeServer(id_):
                await self._provisioner.free(id_)
                return ProvisionerAnswered(request)
            case ListServers():
                return ProvisionerAnswered(request, ids=tuple(await self._provisioner.running()))
            case _:
                assert_never(request)
