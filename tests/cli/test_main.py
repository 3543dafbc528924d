"""The command line as a whole: what it answers at once, and its exit codes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from dynamoth_cli.main import COMMANDS, main

ONE_SERVER = ("--servers", "s1=redis://127.0.0.1:1")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"{name} " in overview
        assert command.summary in overview


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dynamoth 0.")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert "exit codes: 0 done" in " ".join(capsys.readouterr().out.split())


NO_STATE = {
    "agent": "a daemon: its log is JSON",
    "balancer": "a daemon: its log is JSON",
    "coordinator": "a daemon: its log is JSON",
    "data-cluster": "a daemon: its log is JSON",
    "record": "a daemon: it writes Parquet files",
    "acl": "it prints what Redis is configured with",
    "report": "it writes tables, as Parquet files",
    "what-if": "it writes tables, as Parquet files",
    "sim": "it prints what is wrong with this code",
}
"""The commands that print no state of a cluster, and why."""


def _help(*command: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each command, subcommands of subcommands among them, with its help."""
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        main([*command, "--help"])
    subcommands = re.search(r"\{([\w,-]+)\}\s+\.\.\.", printed.getvalue())
    if subcommands is None:
        yield command, printed.getvalue()
        return
    for name in subcommands[1].split(","):
        yield from _help(*command, name)


def test_every_command_that_prints_state_prints_json_as_well() -> None:
    commands = {command: text for name in COMMANDS if name not in NO_STATE for command, text in _help(name)}
    assert {("plan", "move"), ("plan", "compatibility", "list"), ("server", "drain")} <= commands.keys()
    assert [command for command, text in commands.items() if "--json" not in text] == []


def test_the_overview_imports_nothing_heavy() -> None:
    program = "import sys, dynamoth_cli.main as m; m.main(['--help']); print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", program]
    modules = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stderr.split()
    assert "dynamoth_cli.main" in modules
    assert not {"asyncio", "hiredis", "redis", "msgpack", "rich", "dynamoth_link"} & set(modules)


@pytest.mark.parametrize(
    "arguments", [("--version",), ("acl", "--channels", "x"), ("balancer", *ONE_SERVER, "--print-config")]
)
def test_output_to_a_full_disk(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "dynamoth_cli", *arguments]
        ended = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert ended.returncode == 1
    why = "No space left on device: see where it goes"
    assert ended.stderr.splitlines()[-1] == f"dynamoth: the output cannot be written: {why}"
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr


@pytest.mark.parametrize("command", ["agent", "balancer"])
def test_check_and_print_config(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [command, *ONE_SERVER, *(("--server", "s1") if command == "agent" else ())]
    assert main([*arguments, "--check"]) == 0
    assert "the configuration is valid" in capsys.readouterr().err
    assert main([*arguments, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert 'url = "redis://127.0.0.1:1"' in printed
    assert f"[{command}]" in printed


def test_what_is_printed_is_a_valid_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", *ONE_SERVER, "--server", "s1", "--log-level", "debug", "--print-config"]) == 0
    file = tmp_path / "dynamoth.toml"
    file.write_text(capsys.readouterr().out)
    assert main(["agent", "--config", str(file), "--check"]) == 0


def test_the_environment_and_the_file_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dynamoth.toml"
    file.write_text("[log]\nlevel = 'error'\n[agent]\nhttp_port = 9000\n")
    monkeypatch.setenv("DYNAMOTH_CONFIG", str(file))
    monkeypatch.setenv("DYNAMOTH_SERVERS", ONE_SERVER[1])
    monkeypatch.setenv("DYNAMOTH_AGENT_SERVER", "s1")
    monkeypatch.setenv("DYNAMOTH_AGENT_HTTP_PORT", "9001")
    monkeypatch.setenv("DYNAMOTH_LINK_PASSWORD", "hush")
    assert main(["agent", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert f'level = "error"  # {file} line 2, section [log]' in printed
    assert "http_port = 9001  # environment variable DYNAMOTH_AGENT_HTTP_PORT" in printed
    assert "hush" not in printed


def test_secrets_have_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["agent", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--link-password " not in text
    assert "use DYNAMOTH_LINK_PASSWORD" in text
