"""The commands that show jobs: ``status``, ``jobs`` and ``job``."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import RenderableType
from rich.text import Text

from .. import documents
from ..error_text import error_summary
from ..errors import NotFound
from ..model.ids import retry_id
from ..model.job import Job, JobState
from ..model.reading import count_text
from ..model.retry import counted
from . import display
from .command import Command, json_option, run, store_options
from .context import CommandContext
from .display import plain
from .overview import REDIS_DOWN, queue_table, read_overview, token_text, worker_table

if TYPE_CHECKING:
    from ..client import Client

WIDE_ENOUGH = 150
NARROW = ["|id", "|state", "task", "lane", "note"]
STATES = click.Choice([state.value for state in JobState])


@click.command("status", cls=Command)
@click.argument("job_id", metavar="[JOB]", required=False)
@store_options
@json_option
def status_command(job_id: str | None, app_name: str | None, url: str | None, as_json: bool) -> None:
    """Show queues, workers and the leader, or everything about one JOB."""
    context = CommandContext(app_name, url)
    run(_show_job(context, job_id, as_json) if job_id else _show_overview(context, as_json))


@click.command("job", cls=Command)
@click.argument("job_id", metavar="JOB")
@store_options
@json_option
def job_command(job_id: str, app_name: str | None, url: str | None, as_json: bool) -> None:
    """Show everything about one JOB: state, place in line, why it waits, attempts, error, result."""
    run(_show_job(CommandContext(app_name, url), job_id, as_json))


@click.command("jobs", cls=Command)
@click.option("--state", type=STATES, help="Only jobs in this state.")
@click.option("--queue", "-q", help="Only jobs of this queue.")
@click.option("--lane", help="Only jobs of this lane; needs --queue.")
@click.option("--task", help="Only jobs of this task, by its full name.")
@click.option("--worker", metavar="POOL/INDEX", help="Only jobs that are bound to, run on or last ran on this worker.")
@click.option("--sticky", metavar="KEY", help="Only jobs with this sticky key.")
@click.option(
    "--error",
    "--error-group",
    "error_group",
    metavar="GROUP",
    help="Only jobs of this error group, such as 'KeyError in render'.",
)
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@click.option("--cursor", help="Continue from the cursor of an earlier list.")
@store_options
@json_option
def jobs_command(
    app_name: str | None, url: str | None, as_json: bool, limit: int, cursor: str | None, **where: Any
) -> None:
    """List jobs, newest first."""
    run(_list_jobs(CommandContext(app_name, url), where, limit, cursor, as_json))


async def _list_jobs(
    context: CommandContext, where: dict[str, Any], limit: int, cursor: str | None, as_json: bool
) -> None:
    state = where.pop("state")
    async with context.client() as client:
        page = await client.find(**where, state=JobState(state) if state else None, limit=limit, cursor=cursor)
    if as_json:
        listed = [documents.listed_job(job) for job in page.jobs]
        display.show_json({"store": context.shown_url, "jobs": listed, "cursor": page.cursor})
        return
    if not page.jobs:
        such = "such " if state or any(where.values()) else ""
        display.show(display.empty(f"no {such}jobs", context.shown_url))
        return
    display.show(job_table(page.jobs))
    if page.cursor:
        display.show(Text(f"more: --cursor {page.cursor}", style="dim"))


def job_table(jobs: tuple[Job, ...]) -> RenderableType:
    """Jobs as a table. A narrow terminal shows the most important columns."""
    now = time.time()
    cells: dict[str, Callable[[Job], RenderableType]] = {
        "|id": lambda job: plain(job.id),
        "|state": lambda job: display.state_text(job.state.value),
        "task": lambda job: plain(job.task),
        "queue": lambda job: plain(job.queue),
        "lane": lambda job: plain(job.lane),
        "class": lambda job: display.state_text(job.priority.label),
        ">attempt": lambda job: display.number(job.attempt),
        "worker": lambda job: plain(job.worker),
        "sent": lambda job: Text(display.ago(job.enqueued_at, now)),
        "note": lambda job: _note(job, now),
    }
    columns = list(cells) if display.console().width >= WIDE_ENOUGH else NARROW
    return display.table(columns, [[cells[column](job) for column in columns] for job in jobs])


def _note(job: Job, now: float) -> Text:
    """The most important fact about a job in its state."""
    if job.state is JobState.FAILED and job.error:
        return plain(f"{job.reason}: {error_summary(job.error)}", "red", most=80)
    if job.state is JobState.SCHEDULED:
        return plain(f"due {display.ago(job.due_at, now)}")
    if job.state is JobState.RUNNING and job.started_at is not None:
        asked = ", asked to stop" if job.cancel_requested else ""
        return plain(f"for {display.duration(max(0.0, now - job.started_at))}{asked}")
    if job.state.final and job.started_at is not None and job.finished_at is not None:
        took = display.duration(job.finished_at - job.started_at)
        return plain(f"took {took}, {display.ago(job.finished_at, now)}" if job.reason is None else job.reason.value)
    return plain(None if job.reason is None else job.reason.value)


async def _show_job(context: CommandContext, id: str, as_json: bool) -> None:
    async with context.client() as client:
        handle = client.handle(id)
        job = await handle.job()
        position, eta, why = await handle.position(), await handle.eta(), await handle.why()
        retry = await _first_retry(client, job)
    if as_json:
        place = None if position is None else msgspec.to_builtins(position)
        display.show_json({**documents.whole_job(job), "position": place, "eta": eta, "why": why, "retried_as": retry})
        return
    now = time.time()
    rows: list[tuple[str, RenderableType]] = [
        ("job", plain(job.id, "bold")),
        ("task", plain(job.task)),
        ("state", display.state_text(job.state.value)),
        ("why", plain(why)),
    ]
    if position is not None:
        place = count_text(position.place, exact=position.exact)
        line = f"{place} of {count_text(position.of, exact=position.of_exact)}"
        rows.append(("place", plain(f"{line} in its lane, about {position.queue_ahead} ahead in its queue")))
        rows.append(("starts", plain("unknown" if eta is None else f"in about {display.duration(eta)}")))
    rows += [
        ("queue", plain(job.queue)),
        ("lane", plain(job.lane)),
        ("priority", display.state_text(job.priority.label)),
        ("attempt", plain(counted(job.attempt, job.retries))),
        ("worker", plain(job.worker)),
        ("sent", plain(display.ago(job.enqueued_at, now))),
    ]
    if retry is not None:
        rows.append(("retried as", plain(retry)))
    rows += _optional_rows(job, now)
    display.show(display.fields(rows))
    if job.attempts:
        display.show(attempt_table(job, now))
    if job.error:
        display.show("", Text("error", style="bold"), *(plain(line, "red") for line in job.error.strip().split("\n")))


async def _first_retry(client: Client, job: Job) -> str | None:
    """The id of its first retry, if that is stored; further ones have ids that cannot be derived."""
    if not job.state.final:
        return None
    with suppress(NotFound):
        return (await client.job(retry_id(job.id))).id
    return None


def _optional_rows(job: Job, now: float) -> list[tuple[str, RenderableType]]:
    """Rows for fields that only some jobs have."""
    values: dict[str, str | None] = {
        "due": None if job.due_at is None or job.state is not JobState.SCHEDULED else display.ago(job.due_at, now),
        "expires": None if job.expires_at is None or job.state.final else display.ago(job.expires_at, now),
        "started": None if job.started_at is None else display.ago(job.started_at, now),
        "finished": None if job.finished_at is None else display.ago(job.finished_at, now),
        "reason": None if job.reason is None else job.reason.value,
        "sticky": job.sticky,
        "unique": job.unique,
        "retry of": job.retry_of,
        "part of": job.parent,
        "arguments": job.payload.decode(),
        "progress": None if job.progress is None else job.progress.decode(),
        "result": None if job.result is None else job.result.decode(),
    }
    return [(name, plain(value, most=2_000)) for name, value in values.items() if value is not None]


def attempt_table(job: Job, now: float) -> RenderableType:
    """The attempts of a job."""
    return display.table(
        (">fence", ">attempt", "worker", "started", "took", "outcome", "reason", ">refused", "error"),
        [
            (
                display.number(attempt.fence),
                display.number(attempt.attempt),
                plain(attempt.worker),
                Text(display.ago(attempt.started_at, now)),
                Text(display.duration(None if attempt.ended_at is None else attempt.ended_at - attempt.started_at)),
                display.state_text(attempt.outcome or "running"),
                plain(attempt.reason.value if attempt.reason else None),
                display.number(attempt.refused),
                plain(error_summary(attempt.error), "red", most=80),
            )
            for attempt in job.attempts
        ],
        title="attempts",
    )


async def _show_overview(context: CommandContext, as_json: bool) -> None:
    async with context.client() as client:
        overview = await read_overview(client)
        counted = await client.counters()
    if as_json:
        display.show_json({"store": context.shown_url, **overview.record(), "counters": counted})
        return
    fields = [("store", plain(context.shown_url)), ("leader", overview.leader_text())]
    if REDIS_DOWN in counted:
        fields.append(("tokens", token_text(counted)))
    display.show(
        display.fields(fields),
        queue_table(overview.queues, context.shown_url),
        worker_table(overview.workers, context.shown_url),
    )
