"""A program: scenarios of ``cooperative.py`` under gevent or eventlet, one after the other.

Run by ``test_cooperative.py`` as ``python -m tests.client.patched SCHEDULER SCENARIO URL SCENARIO URL ...``. It fails
unless all goes well, and prints nothing.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any


def patch(scheduler: str) -> Any:
    """Let the scheduler replace the standard library, before anything else is imported; return its module."""
    if scheduler == "gevent":
        import_module("gevent.monkey").patch_all()
        return import_module("gevent")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says of itself that it is deprecated
        eventlet: Any = import_module("eventlet")
    warnings.filterwarnings("ignore", "Using fork", DeprecationWarning)
    eventlet.monkey_patch()
    return eventlet


def main(scheduler: str, *arguments: str) -> None:
    """Run scenarios; wait after each until the threads that it began have ended."""
    module = patch(scheduler)
    import threading

    from tests.client.cooperative import SCENARIOS, end_at_exit
    from tests.client.sync_helpers import until

    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    threads = threading.active_count()
    for name, url in zip(arguments[::2], arguments[1::2], strict=True):
        scenarios[name](url, module)
        if scenarios[name] is not end_at_exit:
            until(lambda: threading.active_count() == threads, f"threads have ended: {threading.enumerate()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
