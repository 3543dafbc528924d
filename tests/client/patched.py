"""A program: one of the scenarios of ``cooperative.py`` under gevent or eventlet.

Run by ``test_cooperative.py`` as ``python -m tests.client.patched SCHEDULER SCENARIO URL``. It fails unless all goes
well, and prints nothing.
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


def main(scheduler: str, name: str, url: str) -> None:
    """Run a scenario, and wait until the threads that it began have ended."""
    module = patch(scheduler)
    import threading

    from tests.client.cooperative import SCENARIOS, end_at_exit
    from tests.client.sync_helpers import until

    threads = threading.active_count()
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.__name__ == name)
    scenario(url, module)
    if scenario is not end_at_exit:
        until(lambda: threading.active_count() == threads, f"threads have ended: {threading.enumerate()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
