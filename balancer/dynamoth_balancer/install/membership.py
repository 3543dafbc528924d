"""Changes the list of servers, and which of them are drained, as administrators and provisioners ask.

Theory of operation
-------------------
What was decided is in the plan (``Plan.administration`` and its list of servers), so it survives a restart of the
balancer. A change is *done* when more than half of the servers store it: every later balancer reads one of them. One
change is under way at a time, so that any two lists that balancers may believe in at the same time differ by one server
at most. Then any majority of the one and any majority of the other have a server in common, and only one balancer can
have the lease there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dynamoth.errors import RequestRefused
from dynamoth_balancer.events import InnerAction
from dynamoth_balancer.install.installer import Installer

DRAIN, UNDRAIN = "drain", "undrain"


@dataclass(slots=True)
class MemberChange:
    """A change that was begun, and how far it is."""

    action: str
    server: str
    #: The version of the plan that has it.
    version: int
    #: The term of the installer that began it: a later balancer may have left it out.
    term: int
    #: Why nothing had to be changed; empty where something was.
    note: str = ""

    def is_done(self, installer: Installer) -> bool:
        """Return whether the change is stored so that every later balancer finds it."""
        return installer.term == self.term and installer.is_stored(self.version)


class Membership:
    """Begins changes of the list of servers, one at a time.

    Args:
        installer: returns the one that is at work, or raises RequestRefused where the balancer does not lead.

    """

    def __init__(self, installer: Callable[[], Installer]) -> None:
        self._installer = installer
        #: The change that was begun last.
        self._latest: MemberChange | None = None

    def drain(self, server: str, now: float) -> tuple[MemberChange, list[InnerAction]]:
        """Have a server give up all its channels and slots.

        Raises:
            RequestRefused: there is no such server, no other one would be left, channels are pinned there, or another
                change is under way.

        """
        installer = self._begin(server)
        plan = installer.plan
        if server in installer.draining:
            return self._unchanged(installer, DRAIN, server, "it is being drained already"), []
        if plan.servers.keys() <= installer.draining | {server}:
            others = "all others are being drained" if len(plan.servers) > 1 else "it is the only one"
            raise RequestRefused(
                f"server {server} cannot be drained, as {others}, and its channels would have nowhere to go: add a"
                " server first ('dynamoth server add'), or end the draining of another one"
            )
        if server in plan.administration.pinned_servers:
            raise RequestRefused(
                f"server {server} cannot be drained, as channels are pinned there: unpin them, or pin them elsewhere"
            )
        return self._put(installer, DRAIN, server, installer.draining | {server}, now)

    def undrain(self, server: str, now: float) -> tuple[MemberChange, list[InnerAction]]:
        """Let a server keep its channels and slots, and get others. Raises RequestRefused as :meth:`drain`."""
        installer = self._begin(server)
        if server not in installer.draining:
            return self._unchanged(installer, UNDRAIN, server, "it is not being drained"), []
        return self._put(installer, UNDRAIN, server, installer.draining - {server}, now)

    def _begin(self, server: str) -> Installer:
        """Return the installer, if a change can begin. Raises RequestRefused."""
        installer = self._installer()
        latest = self._latest
        if latest is not None and latest.term == installer.term and not latest.is_done(installer):
            raise RequestRefused(
                f"another change of servers ({latest.action} {latest.server}) is not stored at more than half of the"
                " servers yet: try again when it is"
            )
        if server not in installer.plan.servers:
            raise RequestRefused(f"server {server!r:.80} is not known; known are {', '.join(installer.plan.servers)}")
        return installer

    def _unchanged(self, installer: Installer, action: str, server: str, note: str) -> MemberChange:
        return MemberChange(action, server, installer.plan.administration.version, installer.term, note)

    def _put(
        self, installer: Installer, action: str, server: str, draining: frozenset[str], now: float
    ) -> tuple[MemberChange, list[InnerAction]]:
        administration = replace(installer.plan.administration, draining=draining)
        actions = installer.administer(administration, None, f"an administrator: {action} {server}", now)
        self._latest = MemberChange(action, server, installer.plan.version, installer.term)
        return self._latest, actions
