"""Hostile requests by real sockets: a 4xx within bounds, the connection ends, and nothing is stored."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from .conftest import API
from .serving import Strict, closed, strict
from .test_hostile import BODIES, JSON, KEYS, STRANGE, raw

pytestmark = pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
PATHS = ("/jobs", "/jobs:batch", "/jobs:cancel", "/broadcasts", "/bindings:release", "/queues/default/pause")
JOB = b'{"task": "add", "args": [1]}'


@pytest.fixture
def server(store_url: str, tmp_path: Path) -> Iterator[Strict]:
    """A server process, which has neither failed nor stored or grown much when the test is over."""
    with strict(store_url, tmp_path / "log") as server:
        before = server.memory
        yield server
        assert server.process.poll() is None
        assert httpx.get(f"{server.base}/jobs", timeout=20).json()["jobs"] == []
        told = (tmp_path / "log").read_text()
        assert "Traceback" not in told, told[told.index("Traceback") :][:2_000]
        assert server.memory - before < 100 * 1024 * 1024


def request(path: str, *headers: str, method: str = "POST") -> bytes:
    """The head of a request."""
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", "")).encode()


def test_hostile_bodies(server: Strict) -> None:
    with httpx.Client(timeout=30) as http:
        for path in PATHS:
            for body in BODIES:
                if path == "/jobs:batch" and body == b"[]":
                    continue  # no mistake
                if path == "/queues/default/pause" and body == b"":
                    continue
                began = time.monotonic()
                answer = http.post(server.base + path, content=body, headers=JSON)
                assert 400 <= answer.status_code < 500, (path, body[:80], answer.text[:200])
                assert answer.headers["content-type"] == "application/problem+json"
                assert len(answer.content) < 2_000
                assert time.monotonic() - began < 20


def test_hostile_text(server: Strict) -> None:
    with httpx.Client(timeout=30) as http:
        for text in STRANGE:
            for field in KEYS:
                if text.isprintable() and 0 < len(text) < 200:
                    continue
                escaped = text.replace("\r\n", "\\r\\n").replace("\0", "\\u0000")
                body = raw(f'{{"task":"add","args":[1],"options":{{"{field}":"{escaped}"}}}}')
                answer = http.post(f"{server.base}/jobs", content=body, headers=JSON)
                assert 400 <= answer.status_code < 500, (field, text[:20], answer.text[:200])
                assert len(answer.content) < 2_000
            body = raw(f'{{"task":"{escaped}","args":[1]}}')
            assert http.post(f"{server.base}/jobs", content=body, headers=JSON).status_code in (400, 413, 422)


def test_wrong_content_types(server: Strict) -> None:
    kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None)
    with httpx.Client(timeout=30) as http:
        for path, kind in itertools.product(PATHS, kinds):
            headers = {} if kind is None else {"Content-Type": kind}
            answer = http.post(server.base + path, content=JOB, headers=headers)
            assert (answer.status_code, answer.json()["field"]) == (415, "Content-Type")


@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson", "text/plain"])
@pytest.mark.parametrize("flood", [True, False], ids=["flood", "drip"])
def test_a_chunked_body_that_never_ends(server: Strict, kind: str, flood: bool) -> None:
    paths = [*PATHS, "/jobs/x/cancel", "/nothing", "/queues"]
    part = b"x" * (50_000 if flood else 1)
    with ExitStack() as opened:
        senders = [Endless(opened.enter_context(server.connect()), API + path, kind, part) for path in paths]
        until = time.monotonic() + 15
        while waiting := [sender for sender in senders if not sender.ended]:
            assert time.monotonic() < until, [(sender.path, bytes(sender.answer[:40])) for sender in waiting]
            for sender in waiting:
                sender.go_on()
            time.sleep(0 if flood else 0.02)
    for sender in senders:
        found = sender.answer
        assert found.startswith(b"HTTP/1.1 4") or b'"status":4' in found, (sender.path, found[:300])


@pytest.mark.parametrize("options", [(), ("--loop", "asyncio")], ids=["usual", "asyncio"])
def test_a_head_that_never_ends(store_url: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    """The limit is for the whole head, also for the second one of a connection. A stream is not waiting for one."""
    whole = request("/readyz", method="GET")
    with strict(store_url, tmp_path / "log", *options) as server, ExitStack() as opened:
        silent, stalled, dripping, second, stream = (opened.enter_context(server.connect()) for _ in range(5))
        stalled.sendall(whole[:-2])
        stream.sendall(request(f"{API}/events", method="GET"))
        second.sendall(whole)
        answer = bytearray()
        while not answer.endswith(b"ok\n"):
            answer += second.recv(65_536)
        second.sendall(whole[:3])
        began = time.monotonic()
        dripping.sendall(whole[:-2] + b"X: ")
        while not closed(dripping):
            assert time.monotonic() - began < 15
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                dripping.sendall(b"x")
            time.sleep(0.1)
        assert time.monotonic() - began > 1
        assert rest(silent) == b""
        for late in (stalled, second):
            found = rest(late)
            assert found.startswith(b"HTTP/1.1 408 ")
            assert b"application/problem+json" in found
            assert b'"status":408' in found
        time.sleep(3)
        assert not closed(stream)
        assert httpx.get(f"{server.base}/jobs", timeout=20).status_code == 200
    assert "Traceback" not in (tmp_path / "log").read_text()


def rest(connection: socket.socket) -> bytes:
    """What still comes until the connection ends."""
    found = bytearray()
    while part := connection.recv(65_536):
        found += part
    return bytes(found)


class Endless:
    """A client that sends without end, and takes what comes."""

    def __init__(self, connection: socket.socket, path: str, kind: str, part: bytes) -> None:
        self.path = path
        self.answer = bytearray()
        self.ended = False
        self._connection = connection
        self._chunk = b"%x\r\n%b\r\n" % (len(part), part)
        self._rest = request(path, f"Content-Type: {kind}", "Transfer-Encoding: chunked")
        connection.setblocking(False)

    def go_on(self) -> None:
        """Send some more, and look for the answer and the end."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._rest = self._rest[self._connection.send(self._rest) :] or self._chunk
        try:
            came = self._connection.recv(65_536)
        except BlockingIOError:
            return
        except ConnectionResetError:
            came = b""
        self.answer += came
        self.ended = not came
