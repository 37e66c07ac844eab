"""Commands that change jobs: ``retry``, ``cancel``, ``release``."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import click

from ..errors import InvalidInput
from ..job import JobKind, JobState
from . import display
from .command import Command, json_option, run, store_options
from .display import plain
from .target import Target

if TYPE_CHECKING:
    from ..job import Job, NewJob

PAGE = 200
REPEATABLE = (JobKind.JOB, JobKind.BROADCAST)
RELEASES = {
    "nothing": "is not bound",
    "draining": "is released when its jobs have ended",
    "released": "is released",
}


@click.command("cancel", cls=Command)
@click.argument("ids", metavar="JOB...", nargs=-1, required=True)
@store_options
@json_option
def cancel_command(ids: tuple[str, ...], app_name: str | None, url: str | None, as_json: bool) -> None:
    """Cancel jobs: waiting ones at once, running ones by asking them to stop."""

    async def work(target: Target) -> None:
        async with target.client() as client:
            answers = await client.cancel(ids)
        if as_json:
            display.show_json({"jobs": [{"id": i, "answer": a.value} for i, a in zip(ids, answers, strict=True)]})
            return
        words = {"requested": "runs, and was asked to stop", "cancelled": "is cancelled"}
        for id, answer in zip(ids, answers, strict=True):
            display.show(plain(f"{id} {words.get(answer.value, f'was too late: it is {answer.value}')}"))

    run(work(Target(app_name, url)))


@click.command("retry", cls=Command)
@click.argument("ids", metavar="[JOB]...", nargs=-1)
@click.option("--failed", is_flag=True, help="All failed jobs that this command has not retried yet.")
@click.option("--queue", "-q", help="With --failed: only those of this queue.")
@click.option("--yes", "-y", is_flag=True, help="With --failed: do not ask.")
@store_options
@json_option
def retry_command(
    ids: tuple[str, ...],
    failed: bool,
    queue: str | None,
    yes: bool,
    app_name: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Run jobs that have ended once more, as new jobs."""
    if failed == bool(ids):
        raise InvalidInput("JOB", "name the jobs to retry, or give --failed for all that failed")
    if queue and not failed:
        raise InvalidInput("--queue", "belongs to --failed, which is not given")
    target = Target(app_name, url)
    if failed:
        if not yes:
            click.confirm(f"Retry all failed jobs of {queue or 'every queue'}?", abort=True, err=True)
        run(_retry_failed(target, queue, as_json))
    else:
        run(_retry(target, ids, as_json))


async def _retry(target: Target, ids: tuple[str, ...], as_json: bool) -> None:
    async with target.client() as client:
        new = [(id, (await client.retry(id)).id) for id in ids]
    if as_json:
        display.show_json({"jobs": [{"id": other, "retry_of": id} for id, other in new]})
        return
    for id, other in new:
        display.show(plain(f"{id} runs again as {other}"))


async def _retry_failed(target: Target, queue: str | None, as_json: bool) -> None:
    retried = already = 0
    cursor: str | None = None
    async with target.client() as client:
        known = sum(q.counts.failed for q in await client.queues() if queue in (None, q.name))
        with display.progress("retrying", known) as advance:
            while True:
                page = await client.find(state=JobState.FAILED, queue=queue, limit=PAGE, cursor=cursor)
                again = [_again(job) for job in page.jobs if job.kind in REPEATABLE]
                answers = await client.send(again) if again else []
                retried += sum(answer.created for answer in answers)
                already += sum(not answer.created for answer in answers)
                advance(len(page.jobs))
                cursor = page.cursor
                if cursor is None:
                    break
    if as_json:
        display.show_json({"retried": retried, "already_retried": already})
        return
    before = f", {already:,} were retried before" if already else ""
    display.show(plain(f"{retried:,} failed jobs run again as new ones{before}"))


def _again(job: Job) -> NewJob:
    """The request for its retry, under an id made of its own: repeating the command makes no second one."""
    return job.as_new(f"retry-{hashlib.sha256(job.id.encode()).hexdigest()[:32]}")


@click.command("release", cls=Command)
@click.argument("key")
@click.option("--pool", default="default", show_default=True)
@store_options
@json_option
def release_command(key: str, pool: str, app_name: str | None, url: str | None, as_json: bool) -> None:
    """Release a sticky KEY from its worker, once its jobs have ended."""

    async def work(target: Target) -> None:
        async with target.client() as client:
            answer = await client.release(key, pool=pool)
        if as_json:
            display.show_json({"key": key, "pool": pool, "answer": answer.value})
            return
        display.show(plain(f"{key} {RELEASES[answer.value]}"))

    run(work(Target(app_name, url)))
