"""The command ``enqueue``: one job from the arguments, or many from a file.

With ``-A`` the task validates its arguments and computes its lane; without it the job is sent by name, unchecked.
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
from .context import CommandContext, StoreAccess
from .display import plain

WHY_AFTER = 2.0
"""Seconds after which ``--wait`` without a terminal prints why the job waits."""
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


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job as the command line or a line of a file describes it. The task supplies what is None."""

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
@click.option("--queue", "-q", help="Use this queue instead of the task's.")
@click.option("--lane", help="Use this lane instead of the task's.")
@click.option("--priority", type=PRIORITIES)
@click.option("--delay", type=float, metavar="SECONDS", help="Start no earlier than this many seconds from now.")
@click.option("--unique", metavar="VALUE", help="Create no job while another job of the task has this unique value.")
@click.option("--sticky", metavar="KEY", help="Run on the worker that this sticky key is bound to.")
@click.option("--id", "id_", metavar="ID", help="The job's id. Sending it again creates no second job.")
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@click.option("--wait-timeout", type=float, metavar="SECONDS", help="Wait at most this long. The job continues.")
@click.option(
    "--from-file", type=click.File("rb"), help="Send many jobs, one JSON object per line: task, args, kwargs, …"
)
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
    """Send a job of TASK. ARGS that are not valid JSON are text. Put ARGS that begin with a dash after --.

    \b
    fairlane enqueue -A shop:app render ann "a cat" --wait
    fairlane enqueue shop.render ann "a cat" --lane user:ann
    fairlane enqueue -A shop:app --from-file jobs.jsonl
    """
    given = JobSpec(**options, id=id_)
    if from_file is not None:
        if args or kwargs or wait or id_:
            raise InvalidInput("--from-file", "cannot be combined with ARGS, --kwargs, --id or --wait")
        run(_send_file(CommandContext(app_name, url, StoreAccess.CREATE), from_file, task, given, as_json))
        return
    if task is None:
        raise InvalidInput("TASK", "is required, unless --from-file is given")
    line = msgspec.structs.replace(given, task=task, args=[_value(arg) for arg in args], kwargs=_mapping(kwargs))
    run(
        _send_one(
            CommandContext(app_name, url, StoreAccess.CREATE),
            line,
            wait or wait_timeout is not None,
            wait_timeout,
            as_json,
        )
    )


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


def build_job(context: CommandContext, line: JobSpec) -> NewJob:
    """Build the job that a spec describes."""
    options = {name: value for name in OPTIONS if (value := getattr(line, name)) is not None}
    if line.task is None:
        raise InvalidInput("task", "is missing")
    if not context.has_app:
        if "priority" in options:
            options["priority"] = Priority.parse(options["priority"])
        return NewJob(**{"id": new_id(), **options}, task=line.task, payload=encode_call(line.args, line.kwargs))
    task = context.app.registry.find(line.task)
    try:
        return task.options(**options).call(*line.args, **line.kwargs).job
    except InvalidInput as exc:
        if not exc.problem.startswith("Expected `str`"):
            raise
        raise InvalidInput(exc.field, f"{exc.problem}; quote text that is valid JSON: '\"42\"'") from None
    except TypeError as exc:
        raise InvalidInput("ARGS", str(exc)) from None


async def _send_one(context: CommandContext, line: JobSpec, wait: bool, timeout: float | None, as_json: bool) -> None:
    job = build_job(context, line)
    async with context.client() as client:
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
    display.show(plain(answer.id) if answer.created else Text(f"{answer.id} (exists already, {answer.state.value})"))


async def _result(handle: Handle[Any], timeout: float | None) -> Any:
    """Wait for the result. Meanwhile a terminal shows the state of the job."""
    import asyncio

    error = display.error_console()
    with error.status("sent") if error.is_terminal else nullcontext() as status:
        status_task = asyncio.ensure_future(_print_reason(handle) if status is None else _update_status(handle, status))
        try:
            return await _await_result(handle, timeout)
        finally:
            status_task.cancel()
            await asyncio.gather(status_task, return_exceptions=True)


async def _print_reason(handle: Handle[Any]) -> None:
    """Print once why the job still waits, where no live status can be shown."""
    import asyncio

    await asyncio.sleep(WHY_AFTER)
    click.echo(f"waiting: {escaped(await handle.why())}", err=True)


async def _update_status(handle: Handle[Any], status: Status) -> None:
    async for update in handle.watch():
        text = plain(update.state.value if update.position is None else await handle.why())
        if update.progress is not None:
            text += plain(f"  {update.progress}", most=200)
        status.update(text)


async def _await_result(handle: Handle[Any], timeout: float | None) -> Any:
    try:
        return await handle.result(timeout)
    except TimeoutError as exc:
        raise click.ClickException(f"{exc}; see `fairlane job {handle.id}`") from None


async def _send_file(context: CommandContext, file: IO[bytes], task: str | None, given: JobSpec, as_json: bool) -> None:
    created = known = 0
    async with context.client() as client:
        lines = _jobs(context, file, task, given)
        with display.progress("sending", None) as advance:
            while part := list(islice(lines, MOST_JOBS_PER_CALL)):
                answers = await client.send(part)
                created += sum(answer.created for answer in answers)
                known += sum(not answer.created for answer in answers)
                advance(len(part))
    if as_json:
        display.show_json({"created": created, "known": known})
        return
    display.show(plain(f"{created:,} jobs sent" + (f", {known:,} existed already" if known else "")))


def _jobs(context: CommandContext, file: IO[bytes], task: str | None, given: JobSpec) -> Iterator[NewJob]:
    """Yield the jobs of a file. The options of the command are the defaults for each line."""
    defaults = {name: value for name in OPTIONS if (value := getattr(given, name)) is not None}
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=JobSpec)
            missing = {name: value for name, value in defaults.items() if getattr(line, name) is None}
            yield build_job(context, msgspec.structs.replace(line, task=line.task or task, **missing))
        except msgspec.DecodeError as exc:
            raise InvalidInput(f"line {number}", f"is not a job ({exc}); earlier lines may have been sent") from None
        except InvalidInput as exc:
            raise InvalidInput(
                f"line {number}: {exc.field}", f"{exc.problem}; earlier lines may have been sent"
            ) from None
