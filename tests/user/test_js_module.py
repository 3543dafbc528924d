from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from dynamoth_user.js import NAME, source

ROOT = Path(__file__).parents[2]
CLIENT = (ROOT / "user" / "js" / NAME).read_bytes()


def test_the_module_is_written_to_standard_output() -> None:
    done = subprocess.run([sys.executable, "-m", "dynamoth_user.js"], capture_output=True, check=True)
    assert done.stdout == CLIENT == source()
    assert b"export class Dynamoth extends" in done.stdout


def test_the_wheel_has_the_module(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        assert built.read(f"dynamoth_user/{NAME}") == CLIENT
        built.extractall(tmp_path / "installed")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dynamoth_user.js"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        check=True,
    )
    assert done.stdout == CLIENT
