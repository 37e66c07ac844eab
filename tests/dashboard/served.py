"""A service with its dashboard in a thread, on a store of its own, with workers that a test starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from msgspec.structs import replace

from fairlane import Fairlane, Intervals, Settings, current_job
from fairlane.http import HttpSettings, create_app, service_of
from fairlane.http.operation import Operations
from fairlane.worker.worker import Worker

T = TypeVar("T")
QUICK = replace(Intervals().scaled(0.1), lease=6.0)
GATE_SECONDS = 120.0


class Gate:
    """Holds the jobs of the task `hold` until a test opens it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.seconds = 0.0
        """What a job takes in any case."""

    async def passed(self, times: int = 1) -> None:
        await asyncio.sleep(self.seconds * times)
        for _ in range(int(GATE_SECONDS / 0.02)):
            if self.open.is_set():
                return
            await asyncio.sleep(0.02)


def make_app(url: str, gate: Gate) -> Fairlane:
    """The application of the tests."""
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    app.queue("images").lane("user:*", weight=1)
    app.queue("models").lane("*", limit=1)

    @app.task(name="render", queue="images", lane="user:{user}")
    async def render(user: str, prompt: Any = None) -> Any:
        return {"user": user, "prompt": prompt}

    @app.task(name="hold", queue="images", lane="user:{user}")
    async def hold(user: str) -> str:
        current_job().progress({"percent": 50})
        await gate.passed()
        return f"{user} is done"

    @app.task(name="ask", queue="models", lane="{model}")
    async def ask(model: str, person: str) -> str:
        await gate.passed(3)
        return f"{model} has answered {person}"

    @app.task(name="charge", queue="payments", retries=0)
    async def charge(customer: str) -> None:
        raise ValueError(f"card declined: {customer}")

    @app.task(name="twice", queue="payments", retries=1)
    async def twice() -> int:
        job = current_job()
        if job.attempt == 1:
            raise ValueError("not yet")
        return job.attempt

    @app.task(name="nightly", queue="payments", cron="0 4 * * *")
    async def nightly() -> str:
        return "balanced"

    return app


class Served:
    """The service, its address, and what a test does to its system."""

    def __init__(self, folder: Path, *, extra: Sequence[Operations] = ()) -> None:
        self.url = f"sqlite:///{folder / 'dashboard.db'}"
        self.gate = Gate()
        self.app = make_app(self.url, self.gate)
        self.extra = extra
        self.settings = HttpSettings(signals=False, sample=0.1, token_seconds=0.05, store_seconds=30)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}/"
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._server: uvicorn.Server | None = None
        self._serving: Future[None] | None = None
        self.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine beside the service. The browser's own loop occupies the thread of the test."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def start(self) -> None:
        """Start the service."""
        self.web = create_app(self.app, settings=self.settings, extra=self.extra)
        config = uvicorn.Config(self.web, host="127.0.0.1", port=self.port, log_config=None)
        server = self._server = _Server(config)
        self._serving = asyncio.run_coroutine_threadsafe(server.serve(), self.loop)
        while not server.started:
            assert not self._serving.done(), self._serving.exception()
            threading.Event().wait(0.01)

    def stop(self) -> None:
        """Stop the service. Its streams end."""
        assert self._server is not None
        assert self._serving is not None
        self.loop.call_soon_threadsafe(service_of(self.web).stop)
        self._server.should_exit = True
        self._serving.result(60)
        self._server = None

    def close(self) -> None:
        """Stop everything."""
        self.gate.open.set()
        if self._server is not None:
            self.stop()
        self.run(self.app.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # -- the system ----------------------------------------------------------------------------------------------

    def send(self, task: str, *arguments: Any, **options: Any) -> str:
        """Send a job, and return its id."""
        call = self.app.registry.find(task).options(**options).call(*arguments)
        return self.run(self.app.client.enqueue(call)).id

    def send_many(self, task: str, rows: list[tuple[Any, ...]]) -> None:
        """Send many jobs."""
        found = self.app.registry.find(task)
        self.run(self.app.client.enqueue_many([found.call(*row) for row in rows]))

    def burst(self) -> None:
        """Run what there is."""
        self.run(self.app.worker(burst=True, slots=4).run())

    def token(self, *scopes: str) -> str:
        """Make a token."""
        return self.run(self.app.client.make_token("-".join(scopes), scopes))[1]

    @contextlib.contextmanager
    def working(self, slots: int = 4) -> Iterator[Worker]:
        """A worker inside the block."""
        worker = self.app.worker(slots=slots)
        running = asyncio.run_coroutine_threadsafe(worker.run(), self.loop)
        self.run(worker.ready.wait())
        try:
            yield worker
        finally:
            self.gate.open.set()
            self.loop.call_soon_threadsafe(worker.stop)
            running.result(60)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the main thread."""
        yield
