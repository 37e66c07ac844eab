"""The type checker accepts what is right, and refuses what is wrong, in the words of the user's own call."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEGINNING = """\
from fairlane import Fairlane, current_job

app = Fairlane("sqlite:///never-opened.db")

@app.task(queue="images")
async def render(user: str, prompt: str, *, size: int = 512) -> bytes: return b""

@app.task
def resize(path: str, factor: float) -> int: return 0

async def main() -> None:
"""
WRONG = {
    "await render.enqueue('ann')": "call-arg",
    "await render.enqueue('ann', 7)": "arg-type",
    "await render.enqueue('ann', 'a cat', colour='red')": "call-arg",
    "render.call('ann', 7)": "arg-type",
    "render.blocking.enqueue('ann', 7)": "arg-type",
    "await render.options(queue='mail').enqueue('ann', 7)": "arg-type",
    "render.options(colour='red')": "call-arg",
    "render.options(priority='urgent')": "typeddict-item|arg-type",
    "render.options(delay='soon')": "arg-type",
    "app.task(queue=7)": "arg-type|call-overload",
    "app.task(id='x')": "call-overload",
    "number: int = await (await render.enqueue('ann', 'a cat')).result()": "assignment",
    "text: str = resize.blocking.enqueue('a', 1.0).result()": "assignment",
    "sized: str = resize('a', 1.0)": "assignment",
    "await resize('a', 1.0)": "misc",
    "drawn: str = await render('ann', 'a cat')": "assignment",
    "await app.enqueue_many([render('ann', 'a cat')])": "list-item|arg-type",
    "await app.enqueue_on(object(), render)": "arg-type",
    "app.enqueue_on(object(), render.call('ann', 'a cat'))": "unused-coroutine|unused-awaitable",
    "current_job().transaction()": "unused-awaitable",
    "await app.broadcast(render)": "arg-type",
    "await app.release('plan-7', cleanup=render)": "arg-type",
    "render.enqueue('ann', 'a cat')": "unused-coroutine|unused-awaitable",
    "render.delay('ann', 'a cat')": "attr-defined",
    "render.apply_async(('ann', 'a cat'))": "attr-defined",
    "render.send('ann', 'a cat')": "attr-defined",
    "render.options(countdown=30)": "call-arg",
    "app.task(max_retries=3)": "call-overload",
    "app.autodiscover_tasks()": "attr-defined",
    "render.blocking.enqueue('ann', 'a cat').get()": "attr-defined",
    "(await render.enqueue('ann', 'a cat')).get()": "attr-defined",
    "app.task(retry_on='ValueError')": "arg-type|call-overload",
    "app.around_job(lambda: None)": "type-var|arg-type|misc",
    "app.on_worker_start(7)": "type-var",
    "app.queue('q', limit='4')": "arg-type",
    "app.queue('q').lane(7)": "arg-type",
    "app.turn('flux', on_position=7)": "arg-type",
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """What mypy says about each of the wrong lines, all looked at in one run."""
    file = tmp_path_factory.mktemp("typing") / "wrong.py"
    file.write_text(BEGINNING + "".join(f"    {line}\n" for line in WRONG))
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--enable-error-code", "unused-awaitable", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    found: dict[int, set[str]] = {}
    for line, code in re.findall(r"wrong\.py:(\d+): error: .*\[([a-z-]+)\]$", run.stdout, re.MULTILINE):
        found.setdefault(int(line) - BEGINNING.count("\n") - 1, set()).add(code)
    assert found, run.stdout + run.stderr
    return found


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_call_is_refused_by_the_type_checker(complaints: dict[int, set[str]], line: str) -> None:
    told = complaints.get(list(WRONG).index(line), set())
    assert told & set(WRONG[line].split("|")), f"{line}: {told or 'not a word'}"


def test_nothing_is_refused_before_the_wrong_lines(complaints: dict[int, set[str]]) -> None:
    assert min(complaints) >= 0


def test_the_right_ways_are_accepted() -> None:
    command = [sys.executable, "-m", "mypy", str(Path(__file__).with_name("api.py"))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
