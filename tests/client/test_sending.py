"""An enqueue that is awaited stores a job however it is awaited; one that is dropped is logged."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from fairlane import Fairlane, InvalidInput
from fairlane.task import AsyncTask, Task


@pytest.fixture
def greet(app: Fairlane) -> Task[[str], str]:
    """A task."""

    @app.task(name="greet", lane="user:{name}")
    async def greet(name: str) -> str:
        return f"hello {name}"

    return greet


async def test_a_dropped_enqueue_is_logged_with_the_line_it_stands_in(
    app: Fairlane, greet: Task[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="fairlane"):
        greet.enqueue("ann")
        gc.collect()
    [record] = caplog.records
    assert "greet" in record.getMessage()
    assert f"{__file__}:" in record.getMessage()
    assert "await" in record.getMessage()
    assert "ann" not in record.getMessage(), "arguments belong in no log"
    assert (await app.client.find()).jobs == ()


async def test_a_dropped_enqueue_is_a_warning_where_the_application_has_disabled_the_logger(
    greet: Task[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("fairlane.task"), "disabled", True)
    with pytest.warns(RuntimeWarning, match="greet at .* was never awaited") as caught:
        greet.enqueue("ann")  # It is dropped at once.
    assert [warning.filename for warning in caught] == [__file__]


async def test_an_enqueue_may_be_awaited_gathered_or_made_a_task(
    app: Fairlane, greet: Task[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    await greet.enqueue("ann")
    await asyncio.gather(greet.enqueue("bob"), greet.enqueue("cid"))
    async with asyncio.TaskGroup() as group:
        group.create_task(greet.enqueue("dan"))
    await asyncio.wait_for(greet.enqueue("eve"), 30)
    async with asyncio.timeout(30):
        await asyncio.ensure_future(greet.enqueue("fay"))
    lanes = {lane.lane for lane in await app.client.lanes("default")}
    assert lanes == {f"user:{name}" for name in ("ann", "bob", "cid", "dan", "eve", "fay")}
    gc.collect()
    assert caplog.records == []


async def test_bad_arguments_are_refused_where_they_are_written(app: Fairlane, greet: Task[[str], str]) -> None:
    with pytest.raises(InvalidInput, match="name"):
        greet.enqueue(7)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(TypeError, match="missing"):
        greet.enqueue()  # type: ignore[call-arg]  # the mistake
    with pytest.raises(InvalidInput, match="lane"):
        greet.enqueue("")
    assert (await app.client.find()).jobs == ()


async def test_a_task_that_is_called_runs_here_and_stores_nothing(app: Fairlane, greet: AsyncTask[[str], str]) -> None:
    @app.task
    def shout(text: str) -> str:
        return text.upper()

    assert shout("a") == "A"
    assert await greet("ann") == "hello ann"
    assert (await app.client.find()).jobs == ()
