"""`fairlane serve` as a real process: it starts, refuses to be open, streams, drains, and comes back after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairlane import Fairlane, Settings
from tests.servers.postgresql import free_port

from .conftest import API

ROOT = Path(__file__).resolve().parents[2]


def start(url: str, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fairlane", "serve", "-A", "tests.http.served:app", "--url", url, *options]
    environment = {**os.environ, "FAIRLANE_GRACE": "5"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


@contextmanager
def serving(
    url: str, port: int, *options: str, command: Sequence[str] = (), folder: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    process = (
        subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE)
        if command
        else start(url, "--port", str(port), *options)
    )
    try:
        for _ in range(400):
            try:
                if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None, process.communicate()[1].decode()
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def events_of(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def test_a_stream_outlives_the_server_and_a_stop_drains(store_url: str) -> None:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=base + API, timeout=20) as http:
        with serving(store_url, port) as first:
            id = http.post("/jobs", json={"task": "nap", "args": [2.5]}).json()["id"]
            with http.stream("GET", f"/jobs/{id}/events") as response:
                begun = events_of(response)
                kind, told = next(begun)
                assert (kind, told["state"], told["position"]["place"]) == ("state", "pending", 1)
                first.kill()
                with pytest.raises(httpx.TransportError):
                    list(begun)
        with (
            serving(store_url, port, "--workers-embedded", "1") as second,
            http.stream("GET", f"/jobs/{id}/events", headers={"Last-Event-ID": "x"}) as response,
        ):
            events = events_of(response)
            for _, told in events:
                if told["state"] == "running":
                    second.send_signal(signal.SIGTERM)
                    break
            else:
                raise AssertionError("the job never ran")
            list(events)
            assert second.wait(15) == 0
    with Fairlane(settings=Settings(url=store_url)).blocking as client:
        assert client.job(id).state == "completed"


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
def test_an_address_that_others_reach_needs_a_token(store_url: str) -> None:
    refused = start(store_url, "--host", "0.0.0.0", "--port", str(free_port()))
    _, told = refused.communicate(timeout=30)
    assert refused.returncode == 2
    assert b"make a token" in told
    with Fairlane(settings=Settings(url=store_url)).blocking as client:
        _, secret = client.make_token("me", ["read"])
    port = free_port()
    with serving(store_url, port, "--host", "0.0.0.0"):
        assert httpx.get(f"http://127.0.0.1:{port}{API}/queues").status_code == 401
        headers = {"Authorization": f"Bearer {secret}"}
        assert httpx.get(f"http://127.0.0.1:{port}{API}/queues", headers=headers).status_code == 200
    port = free_port()
    with serving(store_url, port, "--host", "0.0.0.0", "--insecure"):
        assert httpx.get(f"http://127.0.0.1:{port}{API}/queues").status_code == 200


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
def test_an_application_whose_tasks_are_elsewhere_is_served(store_url: str, tmp_path: Path) -> None:
    """Such as one whose tasks are Celery's. Only an embedded worker needs some."""
    (tmp_path / "bare.py").write_text("from fairlane import Fairlane\napp = Fairlane()\n")
    port = free_port()
    command = [sys.executable, "-m", "fairlane", "serve", "-A", "bare", "--url", store_url, "--port", str(port)]
    refused = subprocess.run(
        [*command, "--workers-embedded", "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (refused.returncode, "the application has no tasks" in refused.stderr) == (2, True)
    with serving(store_url, port, command=command, folder=tmp_path):
        assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 200
