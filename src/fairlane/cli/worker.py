"""The command ``worker``: reads its options, reports all invalid ones together, and runs one worker process or
several under a supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from ..config import PREFIX, Settings, parse_queues
from ..errors import InvalidInput
from ..model.names import check_count, check_name, check_seconds
from ..model.slots import MOST_SLOTS, Reserved, Slots
from ..runtime.logs import configure
from . import display
from .command import Command, log_options, run, store_options
from .context import CommandContext, StoreAccess
from .display import plain
from .process_exit import exit_after_grace

if TYPE_CHECKING:
    from ..model.session import Session
    from ..supervisor.parent_pipe import Supervised
    from ..worker.settings import WorkerSettings
    from ..worker.worker import Worker

T = TypeVar("T")
logger = logging.getLogger("fairlane.worker")
MOST_PROCESSES = 1_000


class OptionReader:
    """Reads options one by one and reports all invalid ones together."""

    def __init__(self) -> None:
        self._problems: list[InvalidInput] = []

    def read(self, option: str, read: Callable[[], T], otherwise: T) -> T:
        """Return the value of `read`, or `otherwise` if it is invalid, so that the other options are read too."""
        try:
            return read()
        except InvalidInput as exc:
            # A variable that conflicts with the option is named too.
            problem = str(exc) if exc.field.startswith(PREFIX) else exc.problem
            self._problems.append(InvalidInput(option, problem))
            return otherwise

    def finish(self) -> None:
        """Raise InvalidInput if any option was invalid."""
        if self._problems:
            first, *others = self._problems
            raise InvalidInput(first.field, "; ".join([first.problem, *map(str, others)]))


@click.command("worker", cls=Command)
@click.option("--queues", "-Q", metavar="NAME[=WEIGHT],…", help="Queues to serve. [default: all of the application]")
@click.option("--slots", "-c", type=int, help="Jobs to run at once. [default: 10, or FAIRLANE_MAX_CONCURRENT_TASKS]")
@click.option(
    "--reserved",
    metavar="high=N,normal=N",
    help="Slots for this priority and higher. [default: high=1 with 4 slots or more]",
)
@click.option(
    "--processes", type=int, metavar="N", help="Run N worker processes under a supervisor, each with its own slots."
)
@click.option("--pool", help="The pool whose sticky keys and broadcasts it serves. [default: default]")
@click.option(
    "--index",
    metavar="N|host|auto",
    help="Its index in the pool. auto: the number at the end of the host name, if free.",
)
@click.option(
    "--grace", type=float, metavar="SECONDS", help="How long running jobs may continue on shutdown. [default: 30]"
)
@click.option("--no-manager", is_flag=True, help="Do not stand by as manager.")
@click.option("--burst", is_flag=True, help="Stop when no job is left to run.")
@log_options
@click.option(
    "--metrics-port", type=click.IntRange(1, 65_535), help="Serve Prometheus metrics and health probes on this port."
)
@click.option(
    "--metrics-host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The address of that port."
)
@store_options
def worker_command(
    app_name: str | None,
    url: str | None,
    processes: int | None,
    log_level: str,
    log_format: str | None,
    metrics_port: int | None,
    metrics_host: str,
    **options: Any,
) -> None:
    """Run jobs. SIGTERM or Ctrl-C stops it after its running jobs, a second one immediately."""
    from ..supervisor.parent_pipe import supervised

    context = CommandContext(app_name, url, StoreAccess.CREATE)
    context.require_tasks()
    settings = read_settings(context, processes=processes, **options)
    configure(log_level, log_format)
    # A supervisor starts its processes with this same command line, so --processes is ignored in them.
    parent = supervised(os.environ)
    if parent is None:
        unknown = sorted(settings.queues.keys() - context.app.queue_names() - {"default"})
        if unknown:
            logger.warning("the application has no task and no declaration for queue %s", ", ".join(unknown))
        # The path of a SQLite file may be relative: a worker in another folder would wait for jobs for ever.
        logger.info("serving %s from %s", context.shown_url, Path.cwd())
    if processes is not None and parent is None:
        run(_supervise(context, settings, processes))
    else:
        metrics = None if metrics_port is None else (metrics_host, metrics_port)
        run(_serve(context, settings, options["index"], metrics, parent))


def read_settings(
    context: CommandContext,
    *,
    queues: str | None,
    slots: int | None,
    reserved: str | None,
    processes: int | None,
    pool: str | None,
    index: str | None,
    grace: float | None,
    no_manager: bool,
    burst: bool,
) -> WorkerSettings:
    """Combine the command line with the application's settings. All invalid options are reported together."""
    from ..worker.settings import WorkerSettings

    base = context.app.settings
    options = OptionReader()
    none: dict[str, int] = {}
    found: dict[str, Any] = {
        "queues": options.read("--queues", lambda: _queues(context, queues), none),
        "slots": _slots(base, slots, reserved, options),
        "index": options.read("--index", lambda: _index(base.index, index), None),
        "pool": options.read("--pool", lambda: base.pool if pool is None else check_name("--pool", pool), base.pool),
        "grace": options.read(
            "--grace", lambda: base.grace if grace is None else check_seconds("--grace", grace), base.grace
        ),
    }
    if processes is not None:
        options.read("--processes", lambda: check_count("--processes", processes, least=1, most=MOST_PROCESSES), 1)
    options.finish()
    return WorkerSettings(
        **found, manager=not no_manager, burst=burst, intervals=base.intervals, retention=base.retention
    )


def _queues(context: CommandContext, text: str | None) -> dict[str, int]:
    if text is None:
        return context.app.settings.queues or dict.fromkeys(sorted(context.app.queue_names() | {"default"}), 1)
    queues = parse_queues("--queues", text)
    if not queues:
        raise InvalidInput("--queues", "is empty")
    return queues


def _slots(base: Settings, given: int | None, reserved: str | None, options: OptionReader) -> Slots:
    usual = base.slots
    total = usual.total if given is None else given
    total = options.read("--slots", lambda: check_count("--slots", total, least=1, most=MOST_SLOTS), usual.total)
    if reserved is not None:
        kept = options.read("--reserved", lambda: _reserved(reserved), Reserved())
        return options.read("--reserved", lambda: Slots(total=total, reserved=kept), usual)
    return options.read("--slots", lambda: base.slots_for(None if given is None else total), usual)


def _reserved(text: str) -> Reserved:
    kept: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, count = part.partition("=")
        if name not in Reserved.__struct_fields__ or not equals or not count.isdecimal():
            raise InvalidInput("--reserved", f"{part!r} is invalid; write high=1 or normal=2")
        kept[name] = int(count)
    return Reserved(**kept)


def _index(usual: int | None, text: str | None) -> int | None:
    """The given index; None if the host name or the store determines it."""
    if text is None:
        return usual
    if text in ("auto", "host"):
        return None
    if not text.isdecimal():
        raise InvalidInput("--index", f"{text!r} is not a number, 'host' or 'auto'")
    return check_count("--index", int(text), least=0, most=1_000_000)


# -- running ---------------------------------------------------------------------------------------------------------


async def _supervise(context: CommandContext, settings: WorkerSettings, processes: int) -> None:
    from ..supervisor.supervisor import Supervisor

    supervisor = Supervisor(
        [sys.executable, "-m", "fairlane", *sys.argv[1:]],
        processes=processes,
        open_store=context.app.open_store,
        intervals=settings.intervals,
        grace=settings.grace,
        until_done=settings.burst,
    )
    if sys.stderr.isatty():
        _print_banner(context, settings, f"{processes} worker process{'es' if processes > 1 else ''}")
    code = 1
    try:
        await supervisor.run()
        code = 0
    finally:
        exit_after_grace(lambda: 0.0, code)


async def _serve(
    context: CommandContext,
    settings: WorkerSettings,
    index: str | None,
    metrics: tuple[str, int] | None,
    parent: Supervised | None,
) -> None:
    from ..supervisor.parent_pipe import PROCESS_NUMBER
    from ..worker.worker import Worker
    from ..worker.worker_index import choose_index

    app, signals = context.app, Signals(supervised=parent is not None)
    number = int(os.environ.pop(PROCESS_NUMBER, "0"))
    if settings.index is None:
        settings = msgspec.structs.replace(
            settings, index=await choose_index(context.app.client, context.url, settings, index or "auto", number)
        )
    else:
        settings = msgspec.structs.replace(settings, index=settings.index + number)
    worker = Worker(
        app.connection.hold,
        app.open_store,
        app.registry,
        settings,
        release=app.connection.release,
        declare=app.declare,
        crash_state=parent and parent.crash_state,
        tracer=app.tracer,
        modules=context.modules,
        registered=lambda session: _registered(context, settings, session) if parent is None else None,
        hooks=[each.hooks for each in context.apps],
    )
    signals.attach(worker)
    stop_metrics = serve_metrics(context, worker, None if metrics is None else (metrics[0], metrics[1] + number))
    parent_watch = asyncio.ensure_future(_stop_with_parent(worker, parent)) if parent is not None else None
    code = 1
    try:
        await worker.run()
        code = 0
    except asyncio.CancelledError:
        if not signals.asked:
            raise
        code = 0
    finally:
        if parent_watch is not None:
            parent_watch.cancel()
        stop_metrics()
        await context.close()
        ended = time.monotonic()
        exit_after_grace(lambda: signals.grace_left(since=ended, grace=settings.grace), code)


async def _stop_with_parent(worker: Worker, parent: Supervised) -> None:
    await parent.parent_pipe.wait()
    logger.warning("the supervisor has exited; finishing running jobs")
    worker.stop()


class Signals:
    """Handles signals: the first stops the worker gracefully, the second immediately.

    A worker that still waits for its index is cancelled by the first.
    """

    def __init__(self, *, supervised: bool) -> None:
        # A service manager may signal every process, and the supervisor forwards its own signal: the second one that
        # arrives this soon is the same request.
        self._echo_seconds = 1.0 if supervised else 0.0
        self._first_at = 0.0
        self._task = asyncio.current_task()
        self._worker: Worker | None = None
        self.asked = self._again = False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)

    def attach(self, worker: Worker) -> None:
        """Set the worker that signals stop."""
        self._worker = worker

    def grace_left(self, *, since: float, grace: float) -> float:
        """Seconds left of the grace period, which begins at the first signal or at `since`. 0 after a second one."""
        return 0.0 if self._again else (self._first_at or since) + grace - time.monotonic()

    def _stop(self, number: int) -> None:
        if self.asked and time.monotonic() - self._first_at < self._echo_seconds:
            return
        self._again = self.asked
        self._first_at = self._first_at or time.monotonic()
        words = (
            "returning running jobs" if self.asked else "finishing running jobs; repeat the signal to return them now"
        )
        logger.info("%s: %s", signal.Signals(number).name, words)
        # A worker that is registering completes that and then leaves: an abandoned session would be assigned keys and
        # broadcasts until its lease expires.
        if self._worker is not None and (self._worker.ready.is_set() or not self.asked):
            self._worker.stop(now=self.asked)
        elif self._task is not None:
            self._task.cancel()
        self.asked = True


def serve_metrics(context: CommandContext, worker: Worker, address: tuple[str, int] | None) -> Callable[[], None]:
    """Serve metrics and health probes if an address is given. Returns a function that stops it."""
    if address is None:
        return lambda: None
    try:
        from ..integrations.prometheus import Metrics
        from ..worker.probes import Readiness
        from ..worker.readiness import unready
    except ModuleNotFoundError as exc:
        raise click.ClickException(str(exc)) from None
    reader = context.app.blocking
    metrics = Metrics(context.app.events, queues=reader.queues, sessions=reader.sessions, counters=reader.counters)
    host, port = address
    try:
        return metrics.serve(port, host, Readiness(lambda: unready(worker), reader.leader))
    except OSError as exc:
        where = f"--metrics-port {port}" + ("" if host == "127.0.0.1" else f" --metrics-host {host}")
        raise click.ClickException(f"{where}: {exc.strerror}; choose another port or address") from None


def _registered(context: CommandContext, settings: WorkerSettings, session: Session) -> None:
    if sys.stderr.isatty():
        _print_banner(context, settings, f"worker {session.worker}")


def _print_banner(context: CommandContext, settings: WorkerSettings, name: str) -> None:
    """Print what was started, on a terminal. The log follows."""
    tasks = sorted(task.name for task in context.app.registry)
    queues = ", ".join(f"{queue}={weight}" if weight != 1 else queue for queue, weight in settings.queues.items())
    rows = [
        ("fairlane", plain(name, "bold green")),
        ("store", plain(context.shown_url)),
        ("queues", plain(queues)),
        ("slots", plain(str(settings.slots))),
        ("tasks", plain(", ".join(tasks[:8]) + (f", and {len(tasks) - 8} more" if len(tasks) > 8 else ""))),
        ("stop with", plain("Ctrl-C", "dim")),
    ]
    display.error_console().print(display.fields(rows))
