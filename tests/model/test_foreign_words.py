"""Names of other task queues are answered with Fairlane's names."""

from __future__ import annotations

import copy
import pkgutil
from typing import Any

import pytest

import fairlane
from fairlane import Fairlane, Handle, InvalidInput
from fairlane.handle import BroadcastHandle
from fairlane.model import foreign_words
from fairlane.task import OneCall, TaskSettings

app = Fairlane("sqlite:///never-opened.db")
anything: Any = app


@app.task(name="render")
async def render(user: str, prompt: str = "a cat") -> str:
    return f"{user}: {prompt}"


@app.task(name="keep", lane="user:{user}")
async def keep(user: str) -> None: ...


@app.task(name="loose")
async def loose(**options: int) -> None: ...


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("delay", "`await render.enqueue(…)`, or `render.blocking.enqueue(…)`"),
        ("send", "`await render.enqueue(…)`"),
        ("kiq", "`await render.enqueue(…)`"),
        ("apply_async", "`await render.options(delay=30).enqueue(…)`"),
        ("send_with_options", "`await render.options(delay=30).enqueue(…)`"),
        ("s", "`render.call(…)`"),
        ("si", "`render.call(…)`"),
        ("message", "`render.call(…)`"),
        ("apply", "`render(…)`"),
        ("retry", "raise fairlane.Retry"),
    ],
)
def test_a_foreign_verb_of_a_task_is_answered_with_ours(name: str, ours: str) -> None:
    task: Any = render
    assert not hasattr(task, name)
    assert getattr(task, name, None) is None
    with pytest.raises(AttributeError) as caught:
        getattr(task, name)
    assert str(caught.value).startswith(f"task 'render' has no attribute '{name}'; ")
    assert ours in str(caught.value)
    assert (caught.value.name, caught.value.obj) == (name, task)


def test_an_unknown_attribute_raises_a_plain_attribute_error() -> None:
    task: Any = render
    with pytest.raises(AttributeError, match=r"^task 'render' has no attribute 'dealy'$"):
        task.dealy  # noqa: B018 - that is the point
    assert copy.copy(render).name == "render"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("send_task", "app.client.send"),
        ("conf", "Settings"),
        ("autodiscover_tasks", "`app.autodiscover(package)`"),
        ("actor", "`@app.task`"),
        ("add_periodic_task", "cron="),
        ("add_middleware", "`@app.around_job`"),
        ("on_startup", "`@app.on_worker_start`"),
    ],
)
def test_a_foreign_verb_of_an_application_is_answered_with_ours(name: str, ours: str) -> None:
    with pytest.raises(AttributeError, match=f"the application has no attribute '{name}'") as caught:
        getattr(anything, name)
    assert ours in str(caught.value)
    assert not hasattr(anything, name)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("get", "`await job.result(timeout=…)`"), ("status", "`await job.state()`"), ("revoke", "`await job.cancel()`")],
)
def test_a_foreign_verb_of_a_handle_is_answered_with_ours(name: str, ours: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(app.handle("id"), name)
    assert ours in str(caught.value)
    with pytest.raises(AttributeError) as caught:
        getattr(app.blocking.handle("id"), name)
    assert ours.replace("await ", "") in str(caught.value)


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("countdown", "delay="),
        ("eta", "run_at="),
        ("max_retries", "retries="),
        ("autoretry_for", "retry_on="),
        ("dont_autoretry_for", "no_retry_on="),
        ("retry_backoff", "backoff=Backoff("),
        ("expires_in", "expires="),
        ("time_limit", "timeout="),
        ("job_timeout", "timeout="),
        ("rate_limit", "limit="),
        ("task_id", "id="),
        ("_defer_by", "delay="),
        ("max_tries", "one less"),
        ("bind", "current_job()"),
        ("acks_late", "leave it out"),
    ],
)
def test_a_foreign_option_is_answered_with_ours(option: str, ours: str) -> None:
    task: Any = render
    with pytest.raises(InvalidInput, match=f"{option}: is not an option; ") as caught:
        anything.task(**{option: 1})(render.function)
    assert ours in str(caught.value)
    with pytest.raises(InvalidInput) as caught:
        task.options(**{option: 1})
    assert ours in str(caught.value)


@pytest.mark.parametrize("task", [render, keep])
def test_an_option_among_the_arguments_raises_an_error_that_says_where_it_belongs(task: Any) -> None:
    name = task.__name__
    with pytest.raises(TypeError) as caught:
        task.enqueue("ann", countdown=30)
    assert "unexpected keyword argument 'countdown'" in str(caught.value)
    assert f"write delay=, in seconds, in {name}.options(…)" in str(caught.value)
    with pytest.raises(TypeError) as caught:
        task.blocking.enqueue("ann", delay=30)
    assert f"delay is an option: write {name}.options(delay=…).enqueue(…)" in str(caught.value)
    with pytest.raises(TypeError) as caught:
        task.call("ann", colour="red")
    assert str(caught.value) == f"{name}(): got an unexpected keyword argument 'colour'"
    with pytest.raises(TypeError) as caught:
        task.call("ann", "a cat", "in oil")
    assert str(caught.value) == f"{name}(): too many positional arguments"
    with pytest.raises(TypeError) as caught:
        task.call()
    assert str(caught.value) == f"{name}(): missing a required argument: 'user'"


def test_a_function_that_takes_such_an_argument_gets_it() -> None:
    assert loose.call(countdown=30).job.payload == b'[[],{"countdown":30}]'


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("shared_task", "`@app.task`"),
        ("chain", "there are no workflows"),
        ("group", "enqueue_many"),
        ("chord", "enqueue_many"),
        ("crontab", "@app.task(cron=…)"),
        ("Celery", "Fairlane(…)"),
        ("signature", "`task.call(…)`"),
    ],
)
def test_a_foreign_name_of_the_module_is_answered_with_ours(name: str, ours: str) -> None:
    with pytest.raises(ImportError) as refused:
        __import__("fairlane", fromlist=[name])
    assert str(refused.value).startswith(f"cannot import name '{name}' from 'fairlane'; ")
    assert ours in str(refused.value)
    with pytest.raises(AttributeError) as caught:
        getattr(fairlane, name)
    assert str(caught.value).startswith(f"module 'fairlane' has no attribute '{name}'; ")
    assert ours in str(caught.value)
    assert not hasattr(fairlane, name)


def test_an_unknown_name_of_the_module_raises_the_usual_error() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'Fairlain' from 'fairlane'"):
        from fairlane import Fairlain  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(AttributeError, match=r"^module 'fairlane' has no attribute 'Fairlain'$"):
        getattr(fairlane, "Fairlain")  # noqa: B009 - type checkers refuse the attribute
    assert __import__("fairlane", fromlist=["doctor"]).doctor.diagnose


def test_no_word_of_ours_is_taken_for_a_foreign_one() -> None:
    assert not foreign_words.OPTION.keys() & {*TaskSettings.__annotations__, *OneCall.__annotations__}
    assert [name for name in foreign_words.TASK if name in dir(render)] == []
    assert [name for name in foreign_words.APP if name in dir(app)] == []
    modules = {module.name for module in pkgutil.iter_modules(fairlane.__path__)}
    assert not foreign_words.MODULE.keys() & {*modules, *dir(fairlane)}
    assert [name for name in foreign_words.HANDLE if name in {*dir(Handle), *dir(BroadcastHandle)}] == []
