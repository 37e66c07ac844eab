"""Clients of real sockets that stop reading: they are disconnected, and what is kept for them is bounded."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from .conftest import API
from .serving import closed, strict
from .test_serve import events_of

pytestmark = pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
READERS = 60
MOST_BYTES = 256 * 1024
"""What one stream may keep: uvicorn's buffer of 64 KiB, one event of 15 KB, and the objects of a connection."""


@pytest.mark.parametrize(("loop", "module"), [("asyncio", "strict"), ("uvloop", "strict"), ("uvloop", "traced")])
def test_streams_that_are_not_read_are_ended_on_real_sockets(
    store_url: str, tmp_path: Path, loop: str, module: str
) -> None:
    log = tmp_path / "log"
    with (
        strict(store_url, log, "--loop", loop, module=module) as server,
        ExitStack() as opened,
        httpx.Client(timeout=20) as http,
    ):
        id = http.post(f"{server.base}/jobs", json={"task": "chatter", "args": [60]}).json()["id"]
        with http.stream("GET", f"{server.base}/jobs/{id}/events") as response:
            events = events_of(response)
            next(event for event in events if event[0] == "progress")
            before = server.memory
            readers = [opened.enter_context(server.ask(f"/jobs/{id}/events")) for _ in range(READERS)]
            end = time.monotonic() + 20
            most = 0
            while not all(map(closed, readers)):
                assert time.monotonic() < end, f"{sum(map(closed, readers))} of {READERS} are closed"
                next(events)
                most = max(most, server.memory - before)
            assert most < READERS * MOST_BYTES
            assert next(events)[1]["state"] == "running", "a client that reads keeps its stream"
        told = log.read_text()
        assert "Traceback" not in told
        assert "without completing" not in told, "an error for an operator who can do nothing about it"
        # A connection that waited to be read would keep the server from stopping.
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("module", ["strict", "traced"])
def test_connections_whose_answers_are_not_read_are_ended_on_a_real_socket(
    store_url: str, tmp_path: Path, module: str
) -> None:
    lines = b'{"task":"unknown"}\n' * 500
    with strict(store_url, tmp_path / "log", module=module) as server, server.connect() as client:
        head = ("Host: localhost", "Content-Type: application/x-ndjson", "Transfer-Encoding: chunked")
        client.sendall("\r\n".join((f"POST {API}/jobs:batch HTTP/1.1", *head, "", "")).encode())
        before = server.memory
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_forever(client, b"%x\r\n%b\r\n" % (len(lines), lines))
        assert server.memory - before < 8 * 1024 * 1024
        assert httpx.get(f"{server.base}/jobs", timeout=20).json()["jobs"] == []


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_answer_that_is_not_read_does_not_keep_its_connection(store_url: str, tmp_path: Path, loop: str) -> None:
    """A client that reads it slowly gets the whole answer."""
    with strict(store_url, tmp_path / "log", "--loop", loop) as server:
        size = len(httpx.get(f"{server.base}/openapi.json", timeout=20).content)
        with server.ask("/openapi.json") as client, server.ask("/openapi.json") as slow:
            end = time.monotonic() + 30
            read = 0
            while not closed(client) or read < size:
                assert time.monotonic() < end
                read += len(slow.recv(4_096)) if read < size else 0
                time.sleep(0.1)
        with server.ask("/openapi.json"):
            time.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(15) in (0, -signal.SIGTERM)


def send_forever(client: socket.socket, part: bytes) -> None:
    """Send until the connection breaks; one that takes nothing for long is a `TimeoutError`."""
    while True:
        client.sendall(part)
