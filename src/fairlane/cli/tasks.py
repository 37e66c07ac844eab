"""The commands ``tasks`` and ``schedules``."""

from __future__ import annotations

import time

import click
from rich.text import Text

from .. import documents
from ..documents import schedule_record, signature, task_record
from ..model.schedule import FORGOTTEN_SECONDS, Timetable
from ..model.session import SessionKind, SessionState
from . import display
from .command import Command, json_option, run, store_options
from .context import CommandContext
from .display import plain


@click.command("tasks", cls=Command)
@store_options
@json_option
def tasks_command(app_name: str | None, url: str | None, as_json: bool) -> None:
    """List the tasks of an application with queue, lane, retries, timeout, schedule and arguments."""
    context = CommandContext(app_name, url)
    context.require_tasks()
    tasks = sorted(context.app.registry, key=lambda task: task.name)
    if as_json:
        display.show_json({"app": app_name, "tasks": [task_record(task) for task in tasks]})
        return
    rows = [
        (
            plain(task.name, "bold"),
            plain(task.queue),
            plain(task.lane),
            display.number(task.usual.retries),
            plain(None if task.usual.timeout is None else display.duration(task.usual.timeout)),
            plain(None if task.timetable is None else timetable_text(task.timetable)),
            plain(signature(task)),
        )
        for task in tasks
    ]
    columns = ("task", "queue", "lane", ">retries", ">timeout", "schedule", "arguments")
    display.show(display.table(columns, rows) if rows else plain(f"no tasks in {app_name}", "dim"))


def timetable_text(timetable: Timetable) -> str:
    """Describe when a schedule fires."""
    if timetable.every is not None:
        return f"every {display.duration(timetable.every)}"
    zone = "" if timetable.timezone == "UTC" else f" {timetable.timezone}"
    return f"{timetable.cron}{zone}"


@click.command("schedules", cls=Command)
@store_options
@json_option
def schedules_command(app_name: str | None, url: str | None, as_json: bool) -> None:
    """List the schedules with timetable, next and last run, and when a worker last declared them."""

    async def work(context: CommandContext) -> None:
        async with context.client() as client:
            schedules = await client.schedules()
            sessions = await client.sessions()
        served = any(s.kind is SessionKind.WORKER and s.state is SessionState.LIVE for s in sessions)
        now = time.time()
        found = [schedule_record(each, served, now) for each in schedules]
        if as_json:
            display.show_json({"store": context.shown_url, "schedules": found})
            return
        rows = [
            (
                plain(record["name"], "bold"),
                plain(timetable_text(each.schedule.timetable)),
                Text(display.ago(record["next"], now)),
                Text(display.ago(record["last"], now)),
                _status(record, now),
            )
            for each, record in zip(schedules, found, strict=True)
        ]
        columns = ("schedule", "timetable", "next", "last", "declared")
        display.show(display.table(columns, rows) if rows else display.empty("no schedules", context.shown_url))

    run(work(CommandContext(app_name, url)))


def _status(record: documents.Record, now: float) -> Text:
    age = display.ago(record["declared_at"], now)
    if record["stopped"]:
        return Text(f"{age}; stopped: no worker declares it", style="bold red")
    if not record["live"]:
        left = display.duration(record["declared_at"] + FORGOTTEN_SECONDS - now)
        return Text(f"{age}, no live worker declares it; stops in {left}", style="yellow")
    return Text(age, style="dim")
