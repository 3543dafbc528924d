"""The page's server: its files, the town, and tokens for visitors.

    python -m emergency.serve --brokers ws://... ws://... --keys keys.json --shelters shelters.jsonl --port 8080

Everybody who opens the page becomes a user with a name of their own. The origin of the page has to be among
``broker.origins``. It is a development server: behind a real page there are real logins.
"""

# ruff: noqa: T201 - a terminal is where this script writes

from __future__ import annotations

import argparse
import functools
import json
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import dynamoth_user
from emergency.audit import read_shelters
from emergency.citizens import LOCATIONS
from emergency.reports import TYPES
from emergency.tokens import TokenMaker
from emergency.town import build_town, to_place

PAGE = Path(__file__).with_name("page")
CONTENT_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css"}
BODY_BYTES_MAX = 1000


def client_module() -> Path:
    """Return the file of the browser's client: of an installed package, or of the repository."""
    folder = Path(dynamoth_user.__file__).parent
    installed = folder / "dynamoth.js"
    return installed if installed.exists() else folder.parent / "js" / "dynamoth.js"


def world(brokers: list[str], shelters: Path, seed: int) -> dict[str, Any]:
    """Return what the page has to know: brokers, streets, squares, shelters and types of reports."""
    town = build_town(Random(seed))
    places = [to_place(*crossing) for crossing in town.crossings]
    return {
        "brokers": brokers,
        "crossings": [[place.lat, place.lon] for place in places],
        "neighbours": town.neighbours,
        "squares": [[place.lat, place.lon] for place in town.squares],
        "shelters": read_shelters(shelters),
        "types": TYPES,
    }


class Handler(BaseHTTPRequestHandler):
    """Answers requests of the page."""

    def __init__(self, *arguments: Any, files: dict[str, Path], world: bytes, maker: TokenMaker) -> None:
        self._files = files
        self._world = world
        self._maker = maker
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Serve a file, or the world."""
        path = self.path.partition("?")[0]
        if path == "/world":
            self._answer(self._world, "application/json")
        elif (file := self._files.get("/index.html" if path == "/" else path)) is not None:
            self._answer(file.read_bytes(), CONTENT_TYPES[file.suffix])
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        """Give a token: to a new visitor, or to one who comes back with the former token."""
        if self.path != "/login":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.rfile.read(min(BODY_BYTES_MAX, int(self.headers.get("Content-Length") or 0)))
        name = self._maker.subject(body.decode(errors="replace")) or f"visitor-{secrets.token_hex(4)}"
        token = self._maker.token(name, [LOCATIONS])
        self._answer(json.dumps({"user": name, "token": token}).encode(), "application/json")

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def _answer(self, body: bytes, content_type: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


def make_server(port: int, brokers: list[str], keys: Path, shelters: Path, seed: int) -> ThreadingHTTPServer:
    """Return the server, bound to a port of this machine; 0: a free one."""
    files = {f"/{file.name}": file for file in PAGE.iterdir() if file.suffix in CONTENT_TYPES}
    files["/dynamoth.js"] = client_module()
    answer = json.dumps(world(brokers, shelters, seed)).encode()
    handler = functools.partial(Handler, files=files, world=answer, maker=TokenMaker(keys))
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


def main() -> None:
    """Read the arguments, and serve."""
    parser = argparse.ArgumentParser(description="The page of the emergency application.")
    parser.add_argument("--brokers", nargs="+", required=True, metavar="URL", help="ws://HOST:PORT/connect")
    parser.add_argument("--keys", type=Path, required=True, help="the JSON Web Key Set of the brokers")
    parser.add_argument("--shelters", type=Path, required=True, help="the file that was loaded")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    server = make_server(options.port, options.brokers, options.keys, options.shelters, options.seed)
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
