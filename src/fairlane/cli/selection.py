"""Changes many jobs at once: options that select them, a confirmation, a progress bar, and a summary."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import click
import msgspec

from .. import documents
from ..bulk import FINAL_STATES, LIVE_STATES, Bulk, BulkOptions, JobSelection, Unchanged
from ..errors import FairlaneError, InvalidInput
from ..model.job import JobState
from ..model.names import plural
from . import display
from .command import run
from .context import CommandContext
from .display import plain
from .jobs import STATES, job_table

if TYPE_CHECKING:
    from ..client import Client

F = TypeVar("F", bound=Callable[..., Any])
COUNTED = 10_000
"""The most jobs that are counted for the confirmation; beyond it, the question says "more than"."""
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800, "": 1}
AGE = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)")
INTERRUPTED = 130


class SelectionOptions(TypedDict):
    """The values of the selection options."""

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
    """A duration such as 90s, 30m, 2h or 7d. A bare number is seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        found = AGE.fullmatch(str(value).strip().lower())
        if found is None or found[2] not in UNITS:
            self.fail(f"{value!r} is not an age such as 90s, 30m, 2h or 7d", param, ctx)
        return float(found[1]) * UNITS[found[2]]


def selection_options(verb: str) -> Callable[[F], F]:
    """Add the options that select jobs. `verb` begins the help of ``--all``."""

    def decorate(function: F) -> F:
        for option in reversed(
            (
                click.option("--state", type=STATES, help="Only jobs in this state."),
                click.option("--queue", "-q", help="Only jobs of this queue."),
                click.option("--lane", help="Only jobs of this lane; needs --queue."),
                click.option("--task", help="Only jobs of this task, by its full name."),
                click.option("--error", "error_group", metavar="GROUP", help="Only jobs of this error group."),
                click.option(
                    "--older-than", type=Age(), metavar="AGE", help="Only jobs sent longer ago than this: 90s, 2h, 7d."
                ),
                click.option("--newer-than", type=Age(), metavar="AGE", help="Only jobs sent within this time."),
                click.option("--all", "everything", is_flag=True, help=f"{verb} every job that can be."),
                click.option(
                    "--dry-run", is_flag=True, help="Show how many jobs match and some of them, and change nothing."
                ),
                click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation."),
            )
        ):
            function = option(function)
        return function

    return decorate


class Selection(NamedTuple):
    """The selected jobs, and whether to ask and to change them."""

    which: JobSelection
    words: str
    """The selection as text, for the confirmation."""
    dry_run: bool
    yes: bool


def read_selection(ids: Sequence[str], options: SelectionOptions, verb: str) -> Selection | None:
    """Read the options. Returns None if the jobs are given by id."""
    names = {
        "--state": options["state"],
        "--queue": options["queue"],
        "--lane": options["lane"],
        "--task": options["task"],
        "--error": options["error_group"],
        "--older-than": options["older_than"],
        "--newer-than": options["newer_than"],
    }
    used = [name for name, value in names.items() if value is not None]
    if options["everything"] and used:
        raise InvalidInput("--all", f"cannot be combined with {used[0]}")
    used += ["--all"] if options["everything"] else []
    if ids:
        if used or options["dry_run"]:
            option = used[0] if used else "--dry-run"
            if option == "--state":
                option = "--state (or --failed)"
            raise InvalidInput("JOB", f"job ids cannot be combined with {option}")
        return None
    if not used:
        failed = "--failed, " if verb == "retry" else ""
        ids_hint = "" if verb == "delete" else "give their ids, or "
        waiting = "; waiting jobs are ended by `fairlane cancel`" if verb == "delete" else ""
        how = f"{ids_hint}select them with {failed}--queue, --task, …, or --all{waiting}"
        raise InvalidInput("JOB", f"no jobs to {verb}: {how}")
    which = JobSelection(
        state=None if options["state"] is None else JobState(options["state"]),
        queue=options["queue"],
        lane=options["lane"],
        task=options["task"],
        error_group=options["error_group"],
        older_than=options["older_than"],
        newer_than=options["newer_than"],
    )
    return Selection(which, _describe(options), options["dry_run"], options["yes"])


def _describe(options: SelectionOptions) -> str:
    words = [
        f"{name} {value}"
        for name, value in (
            ("queue", options["queue"]),
            ("lane", options["lane"]),
            ("task", options["task"]),
            ("error", options["error_group"]),
        )
        if value is not None
    ]
    words += [
        f"{name} than {display.duration(age)}"
        for name, age in (("older", options["older_than"]), ("newer", options["newer_than"]))
        if age is not None
    ]
    return ", ".join(words)


class BulkAction(NamedTuple):
    """A bulk operation and the words for it."""

    call: Callable[[Client, BulkOptions], Awaitable[Bulk]]
    question: str
    doing: str
    done: str
    key: str
    """The key of the number of changed jobs in the JSON document."""
    states: Sequence[JobState]


RETRY = BulkAction(
    lambda client, options: client.retry_all(**options), "Retry", "retrying", "retried", "retried", (JobState.FAILED,)
)
CANCEL = BulkAction(
    lambda client, options: client.cancel_all(**options), "Cancel", "cancelling", "cancelled", "cancelled", LIVE_STATES
)
PURGE = BulkAction(
    lambda client, options: client.purge(**options), "Delete", "deleting", "deleted", "forgotten", FINAL_STATES
)
CANCEL_AND_PURGE = PURGE._replace(
    call=lambda client, options: client.purge(cancel_waiting=True, **options),
    states=(JobState.SCHEDULED, JobState.PENDING, *FINAL_STATES),
)

UNCHANGED = {
    Unchanged.ALREADY_RETRIED: "were already retried",
    Unchanged.UNIQUE_TAKEN: "have a unique value that another job has",
    Unchanged.NOT_REPEATABLE: "are turns or clean-ups, which cannot run again",
    Unchanged.REFUSED: "were rejected",
    Unchanged.ALREADY_REQUESTED: "had already been asked to stop",
    Unchanged.TOO_LATE: "had started or ended in the meantime",
    Unchanged.GONE: "no longer exist, or are being written right now",
}


def change_selected(context: CommandContext, action: BulkAction, selection: Selection, as_json: bool) -> None:
    """Count the jobs, ask for confirmation, change them, and print a summary."""
    so_far = Bulk()

    def note(result: Bulk) -> None:
        nonlocal so_far
        so_far = result

    try:
        result = run(_change(context, action, selection, note))
    except KeyboardInterrupt:
        _print_unfinished(action, so_far, "interrupted")
        sys.exit(INTERRUPTED)
    except FairlaneError:
        if so_far.matched:
            _print_unfinished(action, so_far, "failed")
        raise
    if as_json:
        display.show_json({"store": context.shown_url, **_document(action, result)})
        return
    if not result.matched:
        display.show(display.empty("no such jobs", context.shown_url))
    elif result.dry_run:
        display.show(plain(_prediction(action, result, context.shown_url)), job_table(result.sample))
        if result.matched > len(result.sample):
            display.show(plain(f"… and {result.matched - len(result.sample):,} more", "dim"))
    else:
        display.show(plain(_sentence(action, result)))


async def _change(
    context: CommandContext, action: BulkAction, selection: Selection, note: Callable[[Bulk], None]
) -> Bulk:
    async with context.client() as client:
        total: int | None = None
        if not selection.dry_run:
            counting: BulkOptions = {**selection.which, "dry_run": True, "most": COUNTED, "progress": None}
            counted = await action.call(client, counting)
            if not counted.more and not _left(counted):
                return msgspec.structs.replace(counted, dry_run=False)
            total = None if counted.more else counted.matched
            if not selection.yes:
                many = f"more than {COUNTED:,} jobs" if counted.more else _how_many(counted)
                details = "; ".join(filter(None, (selection.words, *_reasons(counted))))
                words = f" ({details})" if details else ""
                _confirm(f"{action.question} {many}{words} in {context.shown_url}?")
        if total is None:
            total = await _most(client, action, selection.which)
        with display.progress(action.doing, total) as advance:
            seen = 0

            def show(result: Bulk) -> None:
                nonlocal seen
                note(result)
                advance(result.matched - seen)
                seen = result.matched

            options: BulkOptions = {**selection.which, "dry_run": selection.dry_run, "most": None, "progress": show}
            return await action.call(client, options)


def _confirm(question: str) -> None:
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise InvalidInput("--yes", "is required without a terminal; --dry-run shows what would change") from None
    if not agreed:
        raise click.Abort


async def _most(client: Client, action: BulkAction, which: JobSelection) -> int:
    """An upper bound of the matching jobs, for the progress bar. Ended jobs count even after they were pruned."""
    states = [which["state"]] if which.get("state") else action.states
    return sum(
        getattr(queue.counts, state.value)
        for queue in await client.queues()
        if which.get("queue") in (None, queue.name)
        for state in states
        if state is not None
    )


def _document(action: BulkAction, result: Bulk) -> documents.Record:
    document: documents.Record = {
        "dry_run": result.dry_run,
        "matched": result.matched,
        action.key: result.changed,
        "unchanged": {why.value: count for why, count in result.unchanged.items()},
        "refusal": result.refusal,
        "jobs": [documents.listed_job(job) for job in result.sample],
    }
    if action is RETRY:
        document["already_retried"] = result.unchanged.get(Unchanged.ALREADY_RETRIED, 0)
    if action is CANCEL:
        document["requested"] = result.requested
    return document


def _prediction(action: BulkAction, result: Bulk, store: str) -> str:
    return ", ".join([f"{_how_many(result)} would be {action.done} in {store}", *_reasons(result)])


def _left(counted: Bulk) -> int:
    """How many jobs a dry run expects to change."""
    return counted.matched - sum(counted.unchanged.values())


def _how_many(counted: Bulk) -> str:
    matched = plural(counted.matched, "job")
    return f"{_left(counted):,} of {matched}" if counted.unchanged else matched


def _reasons(result: Bulk) -> list[str]:
    return [f"{count:,} {UNCHANGED[why]}" for why, count in result.unchanged.items()]


def _sentence(action: BulkAction, result: Bulk) -> str:
    words = [f"{result.changed:,} of {plural(result.matched, 'job')} {action.done}"]
    if result.requested:
        words.append(f"{result.requested:,} are running and were asked to stop")
    return ", ".join([*words, *_reasons(result)]) + (f" ({result.refusal})" if result.refusal else "")


def _print_unfinished(action: BulkAction, result: Bulk, how: str) -> None:
    # A batch whose answer did not arrive is not counted, although it may have been written; the first one too.
    done = f" after {plural(result.matched, 'job')}, {result.changed:,} of them {action.done}" if result.matched else ""
    click.echo(f"{how}{done}; repeat the command for the rest", err=True)
