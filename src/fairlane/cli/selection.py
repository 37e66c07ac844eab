"""Many jobs on the command line: the options that select them, the question before they are changed, a progress bar,
and what became of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import click

from .. import documents
from ..bulk import FINAL_STATES, LIVE_STATES, Bulk, BulkOptions, Unchanged, Which
from ..errors import FairlaneError, InvalidInput
from ..model.job import JobState
from . import display
from .command import run
from .context import Target
from .display import plain
from .jobs import STATES, job_table

if TYPE_CHECKING:
    from ..client import Client

F = TypeVar("F", bound=Callable[..., Any])
COUNTED = 10_000
"""Jobs that are counted before somebody is asked; more are called so."""
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800, "": 1}
AGE = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)")
INTERRUPTED = 130


class Given(TypedDict):
    """The options as they were written."""

    state: str | None
    queue: str | None
    lane: str | None
    task: str | None
    error_group: str | None
    older_than: float | None
    newer_than: float | None
    everything: bool
    dry_run: bool
    yes: bool


class Age(click.ParamType[float]):
    """A duration as people write it: 90s, 30m, 2h, 7d; a number alone is seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        found = AGE.fullmatch(str(value).strip().lower())
        if found is None or found[2] not in UNITS:
            self.fail(f"{value!r} is not an age such as 90s, 30m, 2h or 7d", param, ctx)
        return float(found[1]) * UNITS[found[2]]


def selection_options(verb: str) -> Callable[[F], F]:
    """The options of commands that change many jobs."""

    def decorate(function: F) -> F:
        for option in reversed(
            (
                click.option("--state", type=STATES, help="Only jobs in this state."),
                click.option("--queue", "-q", help="Only jobs of this queue."),
                click.option("--lane", help="Only jobs of this lane; needs --queue."),
                click.option("--task", help="Only jobs of this task, by its full name."),
                click.option("--error", "error_group", metavar="GROUP", help="Only jobs that failed alike."),
                click.option("--older-than", type=Age(), metavar="AGE", help="Only jobs sent longer ago: 90s, 2h, 7d."),
                click.option("--newer-than", type=Age(), metavar="AGE", help="Only jobs sent since then."),
                click.option("--all", "everything", is_flag=True, help=f"{verb} every job there is."),
                click.option("--dry-run", is_flag=True, help="Say how many there are, show some, and change nothing."),
                click.option("--yes", "-y", is_flag=True, help="Do not ask."),
            )
        ):
            function = option(function)
        return function

    return decorate


class Asked(NamedTuple):
    """Which jobs, and how."""

    which: Which
    words: str
    """The selection in words."""
    dry_run: bool
    yes: bool


def read_selection(ids: Sequence[str], given: Given, verb: str) -> Asked | None:
    """What the options select; None when the jobs are named by their ids."""
    names = {
        "--state": given["state"],
        "--queue": given["queue"],
        "--lane": given["lane"],
        "--task": given["task"],
        "--error": given["error_group"],
        "--older-than": given["older_than"],
        "--newer-than": given["newer_than"],
    }
    used = [name for name, value in names.items() if value is not None]
    if given["everything"] and used:
        raise InvalidInput("--all", f"is everything there is; {used[0]} selects a part, give one of them")
    used += ["--all"] if given["everything"] else []
    if ids:
        if used or given["dry_run"]:
            option = used[0] if used else "--dry-run"
            if option == "--state":
                option = "--state (or --failed)"
            raise InvalidInput("JOB", f"jobs that are named and {option} do not go together; give one of them")
        return None
    if not used:
        failed = "--failed, " if verb == "retry" else ""
        named = "" if verb == "forget" else "name them, or "
        raise InvalidInput(
            "JOB", f"say which jobs to {verb}: {named}select them by {failed}--queue, --task …, or --all"
        )
    which = Which(
        state=None if given["state"] is None else JobState(given["state"]),
        queue=given["queue"],
        lane=given["lane"],
        task=given["task"],
        error_group=given["error_group"],
        older_than=given["older_than"],
        newer_than=given["newer_than"],
    )
    return Asked(which, _in_words(given), given["dry_run"], given["yes"])


def _in_words(given: Given) -> str:
    words = [
        f"{name} {value}"
        for name, value in (
            ("queue", given["queue"]),
            ("lane", given["lane"]),
            ("task", given["task"]),
            ("error", given["error_group"]),
        )
        if value is not None
    ]
    words += [
        f"{name} than {display.duration(age)}"
        for name, age in (("older", given["older_than"]), ("newer", given["newer_than"]))
        if age is not None
    ]
    return ", ".join(words)


class Verb(NamedTuple):
    """A bulk verb as the command line tells of it."""

    call: Callable[[Client, BulkOptions], Awaitable[Bulk]]
    question: str
    doing: str
    done: str
    """The word for what was changed, which is its key in a document too."""
    states: Sequence[JobState]


RETRY = Verb(lambda client, options: client.retry_all(**options), "Retry", "retrying", "retried", (JobState.FAILED,))
CANCEL = Verb(lambda client, options: client.cancel_all(**options), "Cancel", "cancelling", "cancelled", LIVE_STATES)
PURGE = Verb(lambda client, options: client.purge(**options), "Forget", "forgetting", "forgotten", FINAL_STATES)
CANCEL_AND_PURGE = PURGE._replace(
    call=lambda client, options: client.purge(cancel_waiting=True, **options),
    states=(JobState.SCHEDULED, JobState.PENDING, *FINAL_STATES),
)

UNCHANGED = {
    Unchanged.ALREADY_RETRIED: "were retried before",
    Unchanged.UNIQUE_TAKEN: "have a unique value that another job holds",
    Unchanged.NOT_REPEATABLE: "are turns or clean-ups, which cannot be run again",
    Unchanged.REFUSED: "were refused",
    Unchanged.ALREADY_REQUESTED: "had been asked to stop before",
    Unchanged.TOO_LATE: "had begun or ended meanwhile",
    Unchanged.GONE: "are gone, or are being written at this moment",
}


def change_many(target: Target, verb: Verb, asked: Asked, as_json: bool) -> None:
    """Count, ask, change and tell."""
    so_far = Bulk()

    def note(told: Bulk) -> None:
        nonlocal so_far
        so_far = told

    try:
        told = run(_change(target, verb, asked, note))
    except KeyboardInterrupt:
        _tell_unfinished(verb, so_far, "interrupted")
        sys.exit(INTERRUPTED)
    except FairlaneError:
        _tell_unfinished(verb, so_far, "it failed")
        raise
    if as_json:
        display.show_json({"store": target.shown_url, **_document(verb, told)})
        return
    if not told.matched:
        display.show(display.nothing("no such jobs", target.shown_url))
    elif told.dry_run:
        display.show(plain(f"{_jobs(told.matched)} would be {verb.done} in {target.shown_url}"), job_table(told.sample))
        if told.matched > len(told.sample):
            display.show(plain(f"… and {told.matched - len(told.sample):,} more", "dim"))
    else:
        display.show(plain(_sentence(verb, told)))


async def _change(target: Target, verb: Verb, asked: Asked, note: Callable[[Bulk], None]) -> Bulk:
    async with target.client() as client:
        total: int | None = None
        if not asked.dry_run:
            counting: BulkOptions = {**asked.which, "dry_run": True, "most": COUNTED, "progress": None}
            counted = await verb.call(client, counting)
            if not counted.matched:
                return counted
            total = None if counted.more else counted.matched
            if not asked.yes:
                many = f"more than {COUNTED:,} jobs" if counted.more else _jobs(counted.matched)
                words = f" ({asked.words})" if asked.words else ""
                _confirm(f"{verb.question} {many}{words} in {target.shown_url}?")
        if total is None:
            total = await _most(client, verb, asked.which)
        with display.progress(verb.doing, total) as advance:
            seen = 0

            def show(told: Bulk) -> None:
                nonlocal seen
                note(told)
                advance(told.matched - seen)
                seen = told.matched

            options: BulkOptions = {**asked.which, "dry_run": asked.dry_run, "most": None, "progress": show}
            return await verb.call(client, options)


def _confirm(question: str) -> None:
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise InvalidInput("--yes", "there is nobody to ask here: give it, or --dry-run to see what there is") from None
    if not agreed:
        raise click.Abort


async def _most(client: Client, verb: Verb, which: Which) -> int:
    """How many jobs there can be at most, for the bar; those that ended count all that ever did."""
    states = [which["state"]] if which.get("state") else verb.states
    return sum(
        getattr(queue.counts, state.value)
        for queue in await client.queues()
        if which.get("queue") in (None, queue.name)
        for state in states
        if state is not None
    )


def _document(verb: Verb, told: Bulk) -> documents.Record:
    document: documents.Record = {
        "dry_run": told.dry_run,
        "matched": told.matched,
        verb.done: told.changed,
        "unchanged": {why.value: count for why, count in told.unchanged.items()},
        "refusal": told.refusal,
        "jobs": [documents.listed_job(job) for job in told.sample],
    }
    if verb is RETRY:
        document["already_retried"] = told.unchanged.get(Unchanged.ALREADY_RETRIED, 0)
    if verb is CANCEL:
        document["requested"] = told.requested
    return document


def _sentence(verb: Verb, told: Bulk) -> str:
    words = [f"{told.changed:,} of {_jobs(told.matched)} {verb.done}"]
    if told.requested:
        words.append(f"{told.requested:,} run and were asked to stop")
    words += [f"{count:,} {UNCHANGED[why]}" for why, count in told.unchanged.items()]
    return ", ".join(words) + (f" ({told.refusal})" if told.refusal else "")


def _tell_unfinished(verb: Verb, told: Bulk, how: str) -> None:
    if told.matched:
        done = f"{how} after {_jobs(told.matched)}, {told.changed:,} of them {verb.done}"
        click.echo(f"{done}; repeat the command for the rest", err=True)


def _jobs(count: int) -> str:
    return f"{count:,} job{'' if count == 1 else 's'}"
