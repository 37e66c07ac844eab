"""The health probes: what they answer while a worker cannot do its work."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

from fairlane.errors import StoreUnavailable
from fairlane.worker.probes import Readiness, serve

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


def metrics(_: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
    """Stands in for Prometheus."""
    start("200 OK", [])
    return [b"numbers"]


class Worker:
    """The state of a worker, as the probes read it."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.away: Exception | None = None
        self.hangs = threading.Event()
        self.hangs.set()

    def look(self) -> None:
        """Read the store."""
        self.hangs.wait(20)
        if self.away is not None:
            raise self.away


@pytest.fixture
def worker() -> Worker:
    """A worker that can work."""
    return Worker()


@pytest.fixture(params=["127.0.0.1", "::1"])
def url(request: pytest.FixtureRequest, worker: Worker) -> Iterator[str]:
    """The address of its port."""
    host = request.param
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    stop = serve(metrics, port, host, Readiness(lambda: worker.problem, worker.look))
    yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    stop()


def ask(url: str) -> tuple[int, str]:
    """The status and the text of an answer."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


def test_a_worker_that_is_well_is_healthy_and_ready(url: str) -> None:
    assert ask(f"{url}/healthz") == (200, "ok")
    assert ask(f"{url}/readyz") == (200, "ok")
    assert ask(f"{url}/metrics") == (200, "numbers")


def test_a_worker_that_does_not_claim_is_not_ready_and_says_why(url: str, worker: Worker) -> None:
    worker.problem = "the worker is stopping"
    assert ask(f"{url}/readyz") == (503, "the worker is stopping")
    assert ask(f"{url}/healthz") == (200, "ok")


def test_a_worker_whose_store_is_away_is_not_ready_and_shows_no_secret(url: str, worker: Worker) -> None:
    worker.away = StoreUnavailable("postgresql://ann:hunter2@db is gone")
    assert ask(f"{url}/readyz") == (503, "the store cannot be read (StoreUnavailable)")
    worker.away = None
    assert ask(f"{url}/readyz") == (200, "ok")


def test_a_store_that_hangs_delays_no_other_request(url: str, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlane.worker.probes.STORE_SECONDS", 0.1)
    worker.hangs.clear()
    assert ask(f"{url}/readyz") == (503, "the store did not answer within 0.1 s")
    assert ask(f"{url}/healthz") == (200, "ok")
    worker.hangs.set()
    monkeypatch.setattr("fairlane.worker.probes.STORE_SECONDS", 10.0)
    assert ask(f"{url}/readyz") == (200, "ok")
