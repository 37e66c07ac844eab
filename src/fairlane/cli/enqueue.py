"""The command ``enqueue``: one job from the arguments, or many from a file.

With ``-A`` the task checks its arguments and fills its lane; without it the job is sent by name, as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import IO, Any

import click
import msgspec
from rich.status import Status
from rich.text import Text

from ..errors import InvalidInput
from ..handle import Handle
from ..model.codec import encode_call
from ..model.ids import new_id
from ..model.job import MOST_JOBS_PER_CALL, NewJob, Priority
from ..runtime.logs import escaped
from . import display
from .command import Command, json_option, run, store_options
from .context import Target, Use
from .display import plain

WHY_AFTER = 2.0
"""Seconds of silence before a command that waits says what it waits for."""
OPTIONS = (
    "queue",
    "lane",
    "priority",
    "delay",
    "expires",
    "unique",
    "sticky",
    "retries",
    "timeout",
    "pool",
    "worker",
    "id",
)
PRIORITIES = click.Choice([priority.label for priority in Priority])


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of jobs. What is not given is left to the task."""

    task: str | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    queue: str | None = None
    lane: str | None = None
    priority: str | None = None
    delay: float | None = None
    expires: float | None = None
    unique: str | None = None
    sticky: str | None = None
    retries: int | None = None
    timeout: float | None = None
    pool: str | None = None
    worker: int | None = None
    id: str | None = None


@click.command("enqueue", cls=Command)
@click.argument("task", required=False)
@click.argument("args", nargs=-1)
@click.option("--kwargs", metavar="JSON", help='Arguments by name: \'{"user": "ann"}\'.')
@click.option("--queue", "-q", help="Another queue than the task's.")
@click.option("--lane", help="The lane, as it stands.")
@click.option("--priority", type=PRIORITIES)
@click.option("--delay", type=float, metavar="SECONDS", help="Not before this many seconds have passed.")
@click.option("--unique", metavar="VALUE", help="Not while another job of the task holds this value.")
@click.option("--sticky", metavar="KEY", help="On the worker that this key is bound to.")
@click.option("--id", "id_", metavar="ID", help="The job's id; sending it again makes no second job.")
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@click.option("--wait-timeout", type=float, metavar="SECONDS", help="Wait no longer than this; the job goes on.")
@click.option("--from-file", type=click.File("rb"), help="Send many, one JSON object per line: task, args, kwargs, …")
@store_options
@json_option
def enqueue_command(
    task: str | None,
    args: tuple[str, ...],
    kwargs: str | None,
    id_: str | None,
    wait: bool,
    wait_timeout: float | None,
    from_file: IO[bytes] | None,
    app_name: str | None,
    url: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Send a job of TASK. ARGS are JSON where they are JSON, and else text; what begins with a dash goes after --.

    \b
    fairlane enqueue -A shop:app render ann "a cat" --wait
    fairlane enqueue shop.render ann "a cat" --lane user:ann
    fairlane enqueue -A shop:app --from-file jobs.jsonl
    """
    given = Line(**options, id=id_)
    if from_file is not None:
        if args or kwargs or wait or id_:
            raise InvalidInput("--from-file", "brings the arguments and ids itself; --wait and ARGS do not go with it")
        run(_send_file(Target(app_name, url, Use.MAKE), from_file, task, given, as_json))
        return
    if task is None:
        raise InvalidInput("TASK", "name the task to run, or give --from-file")
    line = msgspec.structs.replace(given, task=task, args=[_value(arg) for arg in args], kwargs=_mapping(kwargs))
    run(_send_one(Target(app_name, url, Use.MAKE), line, wait or wait_timeout is not None, wait_timeout, as_json))


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _mapping(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise InvalidInput("--kwargs", f"is not a JSON object ({exc})") from None


def job_of(target: Target, line: Line) -> NewJob:
    """The request that a line stands for."""
    options = {name: value for name in OPTIONS if (value := getattr(line, name)) is not None}
    if line.task is None:
        raise InvalidInput("task", "is missing")
    if not target.has_code:
        if "priority" in options:
            options["priority"] = Priority.parse(options["priority"])
        return NewJob(**{"id": new_id(), **options}, task=line.task, payload=encode_call(line.args, line.kwargs))
    task = target.app.registry.find(line.task)
    try:
        return task.options(**options).call(*line.args, **line.kwargs).job
    except InvalidInput as exc:
        if not exc.problem.startswith("Expected `str`"):
            raise
        raise InvalidInput(exc.field, f"{exc.problem}; text that looks like JSON needs quotes: '\"42\"'") from None
    except TypeError as exc:
        raise InvalidInput("ARGS", f"{task.name}: {exc}") from None


async def _send_one(target: Target, line: Line, wait: bool, timeout: float | None, as_json: bool) -> None:
    job = job_of(target, line)
    async with target.client() as client:
        [answer] = await client.send([job])
        handle = client.handle(answer.id)
        if wait:
            if not as_json:
                click.echo(answer.id, err=True)
            result = await _result(handle, timeout)
            display.show_json({"id": answer.id, "created": answer.created, "result": result} if as_json else result)
            return
    if as_json:
        display.show_json({"id": answer.id, "created": answer.created, "state": answer.state.value})
        return
    display.show(plain(answer.id) if answer.created else Text(f"{answer.id} (known already, {answer.state.value})"))


async def _result(handle: Handle[Any], timeout: float | None) -> Any:
    """The result; meanwhile a terminal shows where the job stands."""
    import asyncio

    error = display.error_console()
    with error.status("sent") if error.is_terminal else nullcontext() as status:
        told = asyncio.ensure_future(_tell_why(handle) if status is None else _tell(handle, status))
        try:
            return await _in_time(handle, timeout)
        finally:
            told.cancel()
            await asyncio.gather(told, return_exceptions=True)


async def _tell_why(handle: Handle[Any]) -> None:
    """Where no live line can be shown: say once what a job waits for that does not come."""
    import asyncio

    await asyncio.sleep(WHY_AFTER)
    click.echo(f"waiting: {escaped(await handle.why())}", err=True)


async def _tell(handle: Handle[Any], status: Status) -> None:
    async for update in handle.watch():
        text = plain(update.state.value if update.position is None else await handle.why())
        if update.progress is not None:
            text += plain(f"  {update.progress}", most=200)
        status.update(text)


async def _in_time(handle: Handle[Any], timeout: float | None) -> Any:
    try:
        return await handle.result(timeout)
    except TimeoutError as exc:
        raise click.ClickException(f"{exc}; `fairlane job {handle.id}` shows it") from None


async def _send_file(target: Target, file: IO[bytes], task: str | None, given: Line, as_json: bool) -> None:
    created = known = 0
    async with target.client() as client:
        lines = _jobs(target, file, task, given)
        with display.progress("sending", None) as advance:
            while part := list(islice(lines, MOST_JOBS_PER_CALL)):
                answers = await client.send(part)
                created += sum(answer.created for answer in answers)
                known += sum(not answer.created for answer in answers)
                advance(len(part))
    if as_json:
        display.show_json({"created": created, "known": known})
        return
    display.show(plain(f"{created:,} jobs sent" + (f", {known:,} were known already" if known else "")))


def _jobs(target: Target, file: IO[bytes], task: str | None, given: Line) -> Iterator[NewJob]:
    """The jobs of a file; what its lines leave open is taken from the options of the command."""
    defaults = {name: value for name in OPTIONS if (value := getattr(given, name)) is not None}
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=Line)
            missing = {name: value for name, value in defaults.items() if getattr(line, name) is None}
            yield job_of(target, msgspec.structs.replace(line, task=line.task or task, **missing))
        except msgspec.DecodeError as exc:
            raise InvalidInput(f"line {number}", f"is not a job ({exc}); the lines before may have been sent") from None
        except InvalidInput as exc:
            raise InvalidInput(
                f"line {number}: {exc.field}", f"{exc.problem}; the lines before may have been sent"
            ) from None
