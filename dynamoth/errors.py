"""Errors of Dynamoth. The type says whose fault it is; the text names the cause and the cure."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text for a terminal: control characters, as names of others may have, are escaped, but for new lines."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )


class DynamothError(Exception):
    """Base of every error that Dynamoth raises.

    ``code`` is stable and made for machines (logs, control replies). ``retryable`` says whether the same call can
    succeed later without anybody changing anything.
    """

    code = "error"
    retryable = False


class ConfigError(DynamothError):
    """Raised when a configuration cannot be used: an unknown key, a value out of range, a file that is not there."""

    code = "config"


class PlanError(DynamothError):
    """Raised when a plan, or a change of one, contradicts itself: an unknown server, a mode without its servers."""

    code = "plan"


class MalformedMessage(DynamothError):
    """Raised when bytes that came over the wire are not what they claim to be. Receivers count and drop them."""

    code = "malformed"


class OtherFormat(MalformedMessage):
    """Raised when a stored plan has a format that this version cannot continue: an older or a newer one."""

    code = "other-format"


class UnknownMode(MalformedMessage):
    """Raised when a route has a mode that this software does not know: the sender is newer."""

    code = "unknown-mode"


class RequestRefused(DynamothError):
    """Raised when the balancer refuses an administrator's request, with the reason."""

    code = "refused"


class ClusterUnavailable(DynamothError):
    """Raised when no server of the cluster answers, or none holds a plan."""

    code = "unavailable"
    retryable = True


class AlreadyRunning(DynamothError):
    """Raised when a second agent is started for one server, or a second balancer for one cluster."""

    code = "already-running"
