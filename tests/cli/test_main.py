"""The command line as a whole: what it answers at once, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
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


def test_nothing_at_all_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dynamoth 0.")


def test_an_unknown_command_is_met_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balancr"]) == 2
    assert "'balancr' is no command: did you mean balancer?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert "exit codes: 0 done" in " ".join(capsys.readouterr().out.split())


def test_the_overview_imports_nothing_heavy() -> None:
    program = "import sys, dynamoth_cli.main as m; m.main(['--help']); print(*sys.modules, file=sys.stderr)"
    modules = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=30
    ).stderr.split()
    assert "dynamoth_cli.main" in modules
    assert not {"asyncio", "hiredis", "redis", "msgpack", "rich", "dynamoth_link"} & set(modules)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agent"], "cluster.servers: no server is named: give --servers"),
        (["agent", *ONE_SERVER], "agent.server: which server is this the agent of? Give --server, one of s1"),
        (["agent", *ONE_SERVER, "--server", "s2"], "agent.server: the id of a server of the cluster (s1)"),
        (
            ["agent", *ONE_SERVER, "--server", "s1", "--http-port", "x"],
            "agent.http_port: a whole number from 0 to 65535",
        ),
        (["agent", "--servers", "s1=redis://a:x", "--server", "s1"], "cluster.servers[0].url: 'redis://a:x'"),
        (["agent", "--config", "/nowhere.toml"], "/nowhere.toml cannot be read: No such file or directory"),
        (["balancer", *ONE_SERVER, "--load-ratio-safe", "0.9"], "at most balancer.load_ratio_high, which is 0.8"),
        (["balancer", *ONE_SERVER, "--link-tls-ca-file", "/nowhere"], "link.tls_ca_file: a file that can be read"),
        (["balancer", *ONE_SERVER, "--link-tls-ca-file", __file__], "the TLS files cannot be used"),
        (["status"], "which cluster? Give --url"),
        (["status", "--url", "http://a"], "the URL must begin with one of"),
        (["plan", "move", "c", "--to", "s1"], "which cluster? Give --url"),
    ],
)
def test_wrong_settings_exit_with_2_and_name_the_cure(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DYNAMOTH_URL", raising=False)
    assert main([*arguments, *(["--check"] if arguments[0] in ("agent", "balancer") else [])]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["agent", "--http-prot", "1"],
        ["agent", "--http"],  # no abbreviations: a flag that is added later must not change what a script means
        ["demo", "--players", "0"],
        ["demo", "--seconds", "nan"],
        ["up", "--servers", "0"],
        ["up", "--port-base", "65530"],
        ["plan"],
        ["plan", "move", "c", "--to", "s1", "--timeout", "0"],
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


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


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dynamoth.toml"
    file.write_bytes(b"\xff\xfe")
    assert main(["agent", "--config", str(file), "--check"]) == 2
    assert "it is no UTF-8 text" in capsys.readouterr().err


def test_secrets_have_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["agent", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--link-password " not in text
    assert "use DYNAMOTH_LINK_PASSWORD" in text
