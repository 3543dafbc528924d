"""``dynamoth broker status``, ``drain``, ``move`` and so on: what operators ask of brokers and coordinators."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dynamoth.errors import RequestRefused, printable
from dynamoth_cli.cluster_access import Access, access_of, add_access
from dynamoth_cli.edge_admin import COORDINATORS, EVERYBODY, EdgeAnswers, ask_edge
from dynamoth_cli.numbers import counted, number

RATE_PER_S = 500.0

NO_COORDINATOR = "no coordinator runs: nobody is moved by load, and users are sent to the configured alternates"


def add_orders(parser: argparse.ArgumentParser) -> None:
    """Add the commands. Without one, the daemon runs."""
    commands = parser.add_subparsers(dest="action", title="commands of operators", required=False)
    helps = {
        "status": "show brokers and coordinators",
        "drain": "move all users of a broker to others; it takes no more",
        "undrain": "let a broker take users again",
        "move": "ask one user to move to another broker",
        "explain": "what the coordinator does now, and why",
        "pause": "stop coordinators from moving users by load",
        "resume": "let coordinators move users again",
        "pin": "keep a user where it is",
        "unpin": "let a user be moved again",
    }
    # What was given before the command counts, too: a flag that is not given after it does not replace that.
    parser.set_defaults(url=None)
    every = {
        name: commands.add_parser(name, help=text, argument_default=argparse.SUPPRESS) for name, text in helps.items()
    }
    for name in ("drain", "undrain"):
        every[name].add_argument("broker", metavar="BROKER", help="id of the broker, as 'status' shows it")
    every["drain"].add_argument(
        "--rate", type=_rate, default=RATE_PER_S, metavar="N", help="users asked per second (default %(default)g)"
    )
    every["drain"].add_argument(
        "--force",
        action="store_true",
        default=False,
        help="drain it although no other broker takes users: those it has stay",
    )
    for name in ("move", "pin", "unpin"):
        every[name].add_argument(
            "session", metavar="SESSION", help="the session, with a token SESSION@USER: its name as the client chose it"
        )
    every["move"].add_argument("--to", metavar="BROKER", required=True, help="id of the broker, or its URL")
    for each in every.values():
        each.add_argument("--json", action="store_true", default=False, help="print JSON")
        add_access(each)


def _rate(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"a number above 0 expected, not {text}")
    return value


def run_order(arguments: argparse.Namespace) -> int:
    """Carry out a command. Raises RequestRefused where a broker refuses."""
    access = access_of(arguments)
    result, lines = asyncio.run(_ORDERS[arguments.action](access, arguments))
    for warning in result.get("warnings", ()):
        sys.stderr.write(f"dynamoth: {printable(warning)}\n")
    if arguments.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    return 0


_Result = tuple[Mapping[str, Any], list[str]]


async def _status(access: Access, arguments: argparse.Namespace) -> _Result:
    answers = await ask_edge(access.cluster, access.link, "status")
    found = answers.results("broker")
    brokers = {each["broker"]: dict(each) for each in found}
    coordinators = [dict(each) for each in answers.results("coordinator")]
    result = {
        "brokers": dict(sorted(brokers.items())),
        "coordinators": coordinators,
        "coordinator": next((each for each in coordinators if each["leading"]), None),
        "silent": answers.missing,
        "ambiguous": _ambiguous(found),
        "differing": _differing(found),
    }
    return result, list(describe_status(result))


def _ambiguous(brokers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the ids that several brokers have."""
    counts = Counter(each["broker"] for each in brokers)
    return sorted(id_ for id_, count in counts.items() if count > 1)


def _differing(brokers: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return the settings that all brokers need alike, and in which they differ: the brokers by hash, of each."""
    found: dict[str, dict[str, list[str]]] = {"logs": {}, "history": {}, "presence": {}}
    for each in sorted(brokers, key=lambda each: str(each["broker"])):
        for setting, by_hash in found.items():
            if hashed := each.get(f"{setting}_hash"):  # older brokers do not say it
                by_hash.setdefault(hashed, []).append(each["broker"])
    return {setting: by_hash for setting, by_hash in found.items() if len(by_hash) > 1}


def describe_status(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about brokers and coordinators."""
    brokers: Mapping[str, Mapping[str, Any]] = status["brokers"]
    width = max(map(len, brokers), default=0)
    for id_, broker in brokers.items():
        state = "draining" if broker["draining"] else "open" if broker["admitting"] else "takes no users"
        yield (
            f"{id_:{width}}  {counted(broker['sessions'], 'user')}, {counted(broker['interests'], 'interest')}, load"
            f" ratio {broker['load_ratio']:.3f}, {state}  {broker['url'] or 'no URL: set broker.url'}"
        )
        for server, fault in broker["unreachable"].items():
            yield f"{'':{width}}  cannot use server {server}: {fault}"
        for server, fault in broker.get("unusable_logs", {}).items():  # older brokers do not say it
            yield f"{'':{width}}  cannot use log server {server}: {fault}"
    for each in status["coordinators"]:
        leads = "acts" if each["leading"] else "waits"
        paused = ", paused" if each["paused"] else ""
        yield f"coordinator {each['process']} {leads}{paused}: {counted(each['moves_done'], 'user')} moved"
        for server, fault in each["unreachable"].items():
            yield f"  cannot use server {server}: {fault}"
    if status["coordinator"] is None:
        waiting = bool(status["coordinators"])
        yield "no coordinator has the lease: nobody is moved by load" if waiting else NO_COORDINATOR
    if status["silent"]:
        yield f"{status['silent']} more did not answer"
    for id_ in status["ambiguous"]:
        yield f"warning: several brokers have the id {id_}: give each one of its own (--id, or broker.id)"
    for setting, by_hash in status["differing"].items():
        groups = " | ".join(", ".join(ids) for ids in by_hash.values())
        yield f"warning: brokers differ in broker.{setting}: {groups}. All need the same, or users miss publications"


async def _drain(access: Access, arguments: argparse.Namespace) -> _Result:
    id_: str = arguments.broker
    found = await _unambiguous(access, id_)
    others = [each for each in found if each["broker"] != id_ and each["admitting"] and each["url"]]
    warnings: list[str] = []
    if not others:
        why = f"no other broker takes users: those of {id_} stay there, and newcomers find no broker"
        if not arguments.force:
            raise RequestRefused(f"{why}. Start another broker, or undrain one; --force drains {id_} all the same")
        warnings.append(why)
    result = await _one(access, "drain", id_, {"rate": arguments.rate, "force": arguments.force})
    users = counted(result["sessions"], "user")
    return {**result, "warnings": warnings}, [
        f"{id_} is being drained: {users} to move; 'dynamoth broker status' shows how many"
    ]


async def _undrain(access: Access, arguments: argparse.Namespace) -> _Result:
    await _unambiguous(access, arguments.broker)
    result = await _one(access, "undrain", arguments.broker, {})
    return result, [f"{arguments.broker} takes users"]


async def _unambiguous(access: Access, broker: str) -> list[Mapping[str, Any]]:
    """Return what all brokers say of themselves. Raises RequestRefused where several have this id."""
    found = (await ask_edge(access.cluster, access.link, "status")).results("broker")
    _check_one(broker, [each for each in found if each["broker"] == broker])
    return found


def _check_one(broker: str, found: Sequence[Mapping[str, Any]]) -> None:
    if len(found) > 1:
        urls = ", ".join(sorted(str(each["url"] or "no URL") for each in found))
        raise RequestRefused(
            f"{len(found)} brokers have the id {broker} ({urls}): give each one of its own (--id, or broker.id), and"
            " restart it"
        )


async def _one(access: Access, command: str, broker: str, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    answers = await ask_edge(access.cluster, access.link, command, broker, wanted)
    _raise_refusal(answers)
    found = answers.results("broker")
    _check_one(broker, found)
    return found[0]


def _raise_refusal(answers: EdgeAnswers) -> None:
    if (reason := answers.refusal()) is not None:
        raise RequestRefused(reason)


async def _move(access: Access, arguments: argparse.Namespace) -> _Result:
    url: str = arguments.to
    if "://" not in url:
        answers = await ask_edge(access.cluster, access.link, "status")
        urls = {each["broker"]: each["url"] for each in answers.results("broker")}
        if not urls.get(url):
            known = ", ".join(sorted(urls))
            raise RequestRefused(f"no broker {url} with a URL has answered: there are {known or 'none'}")
        url = urls[url]
    wanted = {"session": arguments.session, "to": [url]}
    answers = await ask_edge(access.cluster, access.link, "move", EVERYBODY, wanted)
    _raise_refusal(answers)
    source = next((each["broker"] for each in answers.results("broker") if each["here"]), None)
    if source is None:
        raise RequestRefused(f"no broker that answers has the session {arguments.session}")
    result = {"session": arguments.session, "from": source, "to": url}
    return result, [f"{arguments.session} at {source} was asked to move to {url}"]


async def _explain(access: Access, arguments: argparse.Namespace) -> _Result:
    result = await _coordinator(access, "explain", {})
    explanation: Mapping[str, Any] = result["explanation"]
    return explanation, list(describe_explanation(result["leading"], explanation))


async def _coordinator(
    access: Access, command: str, wanted: Mapping[str, Any], *, must_act: bool = False
) -> Mapping[str, Any]:
    """Ask all coordinators; return the answer of the one that acts, else of any."""
    answers = await ask_edge(access.cluster, access.link, command, COORDINATORS, wanted)
    _raise_refusal(answers)
    found = answers.results("coordinator")
    leading = next((each for each in found if each["leading"]), None)
    if leading is None and must_act:
        raise RequestRefused(
            "no coordinator acts now, so nothing was changed: try again when 'dynamoth broker status' shows one that"
            " does (it needs the lease at most servers)"
        )
    return leading or found[0]


def describe_explanation(is_leading: bool, explanation: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about what a coordinator does."""
    if not is_leading:
        yield "this coordinator does not act: it has not the lease"
    for id_, broker in explanation["brokers"].items():
        yield f"{id_}  load ratio {broker['load_ratio']:.3f}, {broker['standing']}"
    loads = explanation["loads"]
    yield f"cov {loads['cov']:.3f}, mean {loads['ratio_mean']:.3f}, largest {loads['ratio_max']:.3f}"
    yield f"due: {explanation['due'] or 'nothing'}"
    yield from (f"  {obstacle}" for obstacle in explanation["obstacles"])
    latest = explanation["latest"]
    if latest is not None:
        yield f"latest decision, {latest['number']}: {latest['kind']}, as {latest['reason']}"
        yield from (f"  {counted(move['users'], 'user')} {move['from']} -> {move['to']}" for move in latest["moves"])
        yield f"  {latest['moved']} moved, {latest['failed']} did not; {latest['outcome']}"


async def _order(access: Access, arguments: argparse.Namespace) -> _Result:
    wanted = {"session": arguments.session} if hasattr(arguments, "session") else {}
    result = await _coordinator(access, arguments.action, wanted, must_act=True)
    words = {
        "pause": "users are not moved by load",
        "resume": "users are moved by load",
        "pin": f"{wanted.get('session')} stays where it is",
        "unpin": f"{wanted.get('session')} may be moved",
    }
    return result, [words[arguments.action]]


_ORDERS = {
    "status": _status,
    "drain": _drain,
    "undrain": _undrain,
    "move": _move,
    "explain": _explain,
    "pause": _order,
    "resume": _order,
    "pin": _order,
    "unpin": _order,
}
