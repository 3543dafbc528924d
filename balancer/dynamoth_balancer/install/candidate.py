"""Tries a server before it is added to the plan, over a connection that is then the balancer's link to it.

The link itself makes sure that Redis answers, is new enough, and lets us in.
"""

from __future__ import annotations

import re
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.plan.plan import Plan, Server
from dynamoth.protocol.stored_plan import READ_HEADER, parse_header
from dynamoth_balancer.install.recovery import same_ring, some_of

TAG = "candidate"

ROLE = re.compile(rb"^role:(\w+)", re.MULTILINE)

MODE = re.compile(rb"^redis_mode:(\w+)", re.MULTILINE)


class Candidate:
    """A server that may be added. ``fault`` says in words why it cannot be; empty while nothing speaks against it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        #: Whether the link is up.
        self.is_up = False
        self.run_id: str | None = None
        self.fault = f"no connection to {server.id} yet"
        #: Whether both questions were answered, over the present connection.
        self.is_known = False

    def link_up(self, run_id: str | None) -> list[Send]:
        """Ask what it is, and what it stores."""
        self.is_up, self.run_id, self.is_known = True, run_id, False
        self.fault = f"{self.server.id} has not said yet what it is"
        return [
            Send(self.server.id, (b"INFO",), (TAG, "role")),
            Send(self.server.id, READ_HEADER, (TAG, "header")),
        ]

    def link_down(self, reason: str) -> None:
        """Note why it cannot be reached."""
        self.is_up, self.is_known = False, False
        self.fault = f"{self.server.id} cannot be reached at its URL: {reason}"

    def on_reply(self, what: str, value: Any, plan: Plan, run_ids: dict[str, str | None]) -> bool:
        """Judge an answer; return False where it shows that the server can never be added.

        ``run_ids`` are those of the present servers.
        """
        problem = self._role_problem(value, run_ids) if what == "role" else self._plan_problem(value, plan)
        self.is_known = what == "header" and not problem
        self.fault = problem
        return not problem

    def _role_problem(self, info: Any, run_ids: dict[str, str | None]) -> str:
        id_ = self.server.id
        if isinstance(info, ErrorReply):
            return f"{id_} does not say whether it is a replica ({info}): see the rights that 'dynamoth acl' prints"
        role, mode = (each.search(info) if isinstance(info, bytes) else None for each in (ROLE, MODE))
        if mode is not None and mode[1] != b"standalone":
            what = {b"cluster": "a node of a Redis Cluster", b"sentinel": "a Sentinel"}.get(mode[1], "no single server")
            return f"{id_} is {what}, and Dynamoth uses standalone servers (cluster-enabled no): name one"
        if role is not None and role[1] != b"master":
            return f"{id_} is a replica, and stores nothing itself: name its master, or type REPLICAOF NO ONE there"
        same = next((known for known, run_id in run_ids.items() if run_id is not None and run_id == self.run_id), None)
        return "" if same is None else f"{id_} is the server {same}, by another URL: a server has one id"

    def _plan_problem(self, reply: Any, plan: Plan) -> str:
        if isinstance(reply, ErrorReply):
            return f"the plan at {self.server.id} cannot be read: {reply}"
        try:
            header = parse_header(reply, self.run_id)
        except MalformedMessage:
            return ""  # it is written over
        if header is None or same_ring(header.plan, plan):
            return ""
        return (
            f"{self.server.id} stores the plan of another cluster, with the servers {some_of(header.plan.base)}: name"
            " another server, or stop that cluster and type DEL __dynamoth__:plan there"
        )
