"""Which processes run, as ``ps`` lists them."""

from __future__ import annotations

import re
import subprocess


def command_lines(*selection: str) -> dict[int, str]:
    """Return the command lines of the processes that an option of ``ps`` selects, by their ids; none is no error.

    Each is whole (``-ww``): ``ps`` cuts what it writes at the COLUMNS of whoever runs the tests.
    """
    command = ["ps", "-ww", "-o", "pid=,args=", *selection]
    listed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert not listed.stderr, listed.stderr
    return {int(pid): arguments for pid, arguments in re.findall(r"^ *(\d+) (.*)$", listed.stdout, re.MULTILINE)}
