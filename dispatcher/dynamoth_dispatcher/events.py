"""The events and actions of a dispatcher, and the name of its own server's link."""

from __future__ import annotations

from dynamoth.machine.events import Connect, Disconnect, LinkEvent, Send, SendAll

DispatcherEvent = LinkEvent

DispatcherAction = Connect | Disconnect | Send | SendAll

LOCAL = "local"
"""The link to the dispatcher's own server."""
