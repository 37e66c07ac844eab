"""Which worker records results, and from where on, without workers."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from celery import Celery

from fairlane import Fairlane
from fairlane.integrations.celery import Fair, StickyRouter, result_recorder
from fairlane.integrations.celery.result_recorder import RoleByEntry
from fairlane.integrations.celery.results import remembers

SAME = ("celery", "celery")


class Backend:
    """A result backend in memory."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}

    def get_task_meta(self, id: str, *, cache: bool) -> dict[str, Any]:
        return {"result": self.stored.get(id)}

    def store_result(self, id: str, result: str, state: str) -> None:
        self.stored[id] = result


def roles(backend: Backend, *queues: str) -> tuple[RoleByEntry, RoleByEntry]:
    """Two workers of one application, each with the name of its fair queue."""

    async def call(function: Callable[[], Any]) -> Any:
        return function()

    first, second = (
        SimpleNamespace(
            app=SimpleNamespace(main="shop", backend=backend),
            fairlane=SimpleNamespace(settings=SimpleNamespace(url="redis://")),
            choice=([queue], None),
        )
        for queue in queues
    )
    return RoleByEntry(cast("Fair", first), call, Random(1)), RoleByEntry(cast("Fair", second), call, Random(2))


def test_a_worker_that_dies_as_soon_as_it_took_over_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_recorder, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(result_recorder, "SILENCE_SECONDS", 0.05)
    backend = Backend()
    first, second = roles(backend, *SAME)

    async def early() -> str:
        return "early"

    async def late() -> str:
        return "late"

    async def scene() -> str:
        taking = asyncio.create_task(first.acquire(early))
        while not backend.stored:
            await asyncio.sleep(0)
        taking.cancel()
        return await second.acquire(late)

    assert asyncio.run(scene()) == "early"


def test_a_worker_that_leaves_is_followed_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_recorder, "CONFIRM_SECONDS", 0.0)
    first, second = roles(Backend(), *SAME)

    async def present() -> str:
        return "present"

    async def scene() -> None:
        assert await first.acquire(present) == "present"
        assert await first.keep("further")
        assert not await second.keep("wrong")
        await first.release()
        assert await second.acquire(present) == "further"
        assert not await first.keep("stale")

    asyncio.run(scene())


def test_workers_with_other_fair_queues_record_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each knows the results of its own queues only, and would leave out those of the other."""
    monkeypatch.setattr(result_recorder, "CONFIRM_SECONDS", 0.0)
    first, second = roles(Backend(), "celery", "images")

    async def present() -> str:
        return "present"

    async def scene() -> None:
        assert await first.acquire(present) == "present"
        assert await first.keep("further")
        assert await second.acquire(present) == "present"
        assert await first.keep("even further")

    asyncio.run(asyncio.wait_for(scene(), 10))


@pytest.mark.parametrize(
    ("url", "kept"), [("rpc://", False), ("redis://", True), ("disabled://", False), (None, False)]
)
def test_which_backends_keep_results(url: str | None, kept: bool) -> None:
    """Results of `rpc://` are messages to their caller; these may be persistent."""
    app = Celery("keeping", broker="memory://localhost", backend=url, set_as_current=False)
    app.conf.result_persistent = True
    assert remembers(app.backend) is kept
    app.close()


def test_the_choice_of_queues_names_the_router(tmp_path: Path) -> None:
    app, fairlane = Celery("choice", set_as_current=False), Fairlane(f"sqlite:///{tmp_path}/fairlane.db")
    fair = Fair(app, fairlane, queues=["b", "a"])
    choices = [fair.choice]
    StickyRouter(app, fairlane, org="org")
    choices.append(fair.choice)
    assert choices == [(["a", "b"], None), (["a", "b"], "org")]
