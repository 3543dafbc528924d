"""Wrong arguments and settings: exit code 2, and a message that names what is wrong or the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamoth_cli.main import main

ONE_SERVER = ("--servers", "s1=redis://127.0.0.1:1")
AGENT = ("agent", "--check", *ONE_SERVER, "--server", "s1")
BALANCER = ("balancer", "--check", *ONE_SERVER)
FLEET = (*BALANCER, "--fleet-provisioner")
REPLICATE = ("plan", "replicate", "c", "--mode")


def refusal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command says that must exit with 2."""
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == 2, printed
    return printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage:"),
        (("balancr",), "'balancr' is no command: did you mean balancer?"),
        (("agent", "--check"), "cluster.servers: no server is named: give --servers"),
        (AGENT[:-2], "agent.server: which server is this the agent of? Give --server, one of s1"),
        ((*AGENT, "--servers", "s1=redis://a:x"), "cluster.servers[0].url: 'redis://a:x'"),
        ((*AGENT, "--config", "/nowhere.toml"), "/nowhere.toml cannot be read: No such file or directory"),
        ((*AGENT, "--http-prot", "1"), "unrecognized arguments: --http-prot 1: did you mean --http-port?"),
        ((*AGENT, "--http", "1"), "unrecognized arguments: --http"),  # no abbreviations: they change with later flags
        ((*BALANCER, "--load-ratio-safe", "0.9"), "at most balancer.load_ratio_high, which is 0.8"),
        ((*BALANCER, "--link-tls-ca-file", "/nowhere"), "link.tls_ca_file: a file that can be read"),
        ((*BALANCER, "--link-tls-ca-file", __file__), "the TLS files cannot be used"),
        ((*FLEET, "cloud"), "fleet.provisioner: one of none, pool, process, command expected, not 'cloud' (from flag"),
        (
            (*BALANCER, "--fleet-servers-min", "3", "--fleet-servers-max", "2"),
            "fleet.servers_max must be at least servers_min (3), not 2: raise the one or lower the other (from flag",
        ),
        ((*FLEET, "command"), "fleet.command: a program that exists and is executable, with its arguments, (name its"),
        ((*FLEET, "command", "--fleet-command", "/nowhere/start --fast"), "not '/nowhere/start --fast' (from flag"),
        ((*FLEET, "command", "--fleet-command", __file__), "see chmod +x) expected, not"),
        ((*FLEET, "command", "--fleet-command", "a 'b"), "with every quote closed (No closing quotation)"),
        ((*FLEET, "pool"), "fleet.pool: the provisioner 'pool' needs standby servers: name their URLs"),
        ((*FLEET, "pool", "--fleet-pool", "redis://a redis://a"), "names servers twice: redis://a (from flag"),
        ((*FLEET, "pool", "--fleet-pool", "http://a"), "fleet.pool: 'http://a': the URL must begin with"),
        ((*FLEET, "process"), "fleet.folder: a folder for the servers of the provisioner process expected, not ''"),
        ((*FLEET, "process", "--fleet-folder", "x", "--link-username", "u"), "know no users (pool and command can)"),
        (("query", "set", "f.toml", "--confg", "d.toml"), "arguments: --confg d.toml: did you mean --config?"),
        (("query", "--confg", "d.toml", "set", "f.toml"), "arguments: --confg"),
        (("query", "list", "--jsn"), "unrecognized arguments: --jsn: did you mean --json?"),
        (("query", "list", "--zzz"), "unrecognized arguments: --zzz\n"),
        (("status",), "which cluster? Give --url"),
        (("record", "--out", "x"), "which cluster? Give --url"),
        (("record", "--url", "dynamoth://a"), "recorder.out is not set: give --out"),
        (("record", "--url", "dynamoth://a", "--out", f"{__file__}/x"), "cannot be written (Not a directory)"),
        (("status", "--url", "http://a"), "the URL must begin with one of"),
        (("demo", "--players", "0"), "argument --players"),
        (("demo", "--seconds", "nan"), "argument --seconds"),
        (("up", "--servers", "0"), "argument --servers"),
        (("up", "--port-base", "65530"), "argument --port-base"),
        (("plan",), "required: action"),
        (("plan", "move", "c", "--to", "s1"), "which cluster? Give --url"),
        (("plan", "move", "", "--to", "s1"), "the name of a channel expected, not nothing"),
        (("plan", "move", "c", "--to", "s1", "--timeout", "0"), "more than 0 s expected, at most"),
        (("plan", "move", "c", "--to", "s1", "--timeout", "1e9"), "more than 0 s expected, at most"),
        (("plan", "move", "c", "--to", "s1", "--timeout", "soon"), "--timeout: a number expected, not 'soon'"),
        (("plan", "show", ""), "the name of a channel expected, not nothing"),
        ((*REPLICATE, "all-publishers"), "one of the arguments --servers --count is required"),
        ((*REPLICATE, "single", "--count", "2"), "invalid choice: 'single'"),
        ((*REPLICATE, "all-publishers", "--servers", "s1,s2", "--count", "2"), "not allowed with"),
        ((*REPLICATE, "all-publishers", "--count", "many"), "invalid int value: 'many'"),
        (("plan", "replicate", "c", "--servers", "s1,s2"), "required: --mode"),
        (("plan", "unreplicate"), "required: CHANNEL"),
        (("plan", "compatibility"), "required: {list,add,lift,remove}"),
        (("sim",), "--seeds"),
        (("sim", "--seeds", "x"), "seeds are given as A-B"),
        (("sim", "--seeds", "5-1"), "there is no seed"),
        (("sim", "--seeds", "1", "--scenario", "nonsense"), "invalid choice: 'nonsense'"),
        (("sim", "--seeds", "1", "--jobs", "0"), "a number from 1 to 1024"),
        (("acl",), "--channels"),
        (("acl", "--channels", "a b"), "cannot hold spaces"),
        (("acl", "--channels", "a(b"), "cannot hold spaces"),
        (("acl", "--channels", ""), "cannot hold spaces"),
        (("acl", "--channels", "__dynamoth__:*"), "nothing but names of Dynamoth's own"),
        (("acl", "--channels", "__dynamoth__:plan"), "nothing but names of Dynamoth's own"),
        (("acl", "--channels", "*?*?*?*?*?*?*"), "too many stars"),
    ],
)
def test_wrong_use_exits_with_2_and_is_named(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DYNAMOTH_URL", raising=False)
    assert message in refusal(*arguments, capsys=capsys)


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (("agent", "--check", "--config"), b"\xff\xfe", "it is no UTF-8 text"),
        *((("acl", "--channels", "a", "--passwords"), text, "line 1") for text in (b"nobody x", b"agent", b"agent \n")),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    arguments: tuple[str, ...], content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert message in refusal(*arguments, str(file), capsys=capsys)
