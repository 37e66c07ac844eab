"""The command ``worker``: reads what one worker is to do, tells every problem at once, and runs it, alone or as
several processes under a supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from ..config import Settings, parse_queues
from ..errors import InvalidInput
from ..model.names import check_count, check_name, check_seconds
from ..model.slots import MOST_SLOTS, Reserved, Slots
from ..runtime.logs import configure
from . import display
from .command import Command, log_options, run, store_options
from .context import Target, Use
from .display import plain
from .ending import end_after
from .worker_index import choose_index

if TYPE_CHECKING:
    from ..model.session import Session
    from ..supervisor.parent_pipe import Supervised
    from ..worker.settings import WorkerSettings
    from ..worker.worker import Worker

T = TypeVar("T")
logger = logging.getLogger("fairlane.worker")
MOST_PROCESSES = 1_000


class Attempt:
    """Reads options one by one, and tells of all that cannot be read together."""

    def __init__(self) -> None:
        self._problems: list[str] = []

    def __call__(self, option: str, read: Callable[[], T], otherwise: T) -> T:
        """What `read` returns; `otherwise` stands in when it refuses, so that the others are looked at too."""
        try:
            return read()
        except InvalidInput as exc:
            self._problems.append(f"{option}: {exc.problem}")
            return otherwise

    def finish(self) -> None:
        """Refuse to go on if anything was wrong."""
        if self._problems:
            raise InvalidInput("options", "; ".join(self._problems))


@click.command("worker", cls=Command)
@click.option("--queues", "-Q", metavar="NAME[=WEIGHT],…", help="Queues to serve; else all the application names.")
@click.option("--slots", "-c", type=int, help="Jobs to run at once. [10, or FAIRLANE_MAX_CONCURRENT_TASKS]")
@click.option(
    "--reserved", metavar="high=N,normal=N", help="Slots kept for a class and those above it. [high=1 from 4 slots on]"
)
@click.option("--processes", type=int, metavar="N", help="N processes under a supervisor, each with these slots.")
@click.option("--pool", help="The pool whose sticky keys and broadcasts it takes. [default]")
@click.option("--index", metavar="N|host|auto", help="Its place in the pool. auto: the host name's number, if free.")
@click.option("--grace", type=float, metavar="SECONDS", help="How long bodies may go on at a stop. [30]")
@click.option("--no-manager", is_flag=True, help="Host no standby of the manager.")
@click.option("--burst", is_flag=True, help="Stop when there is nothing left to run.")
@log_options
@click.option(
    "--metrics-port", type=click.IntRange(1, 65_535), help="Answer Prometheus and health probes on this port."
)
@click.option("--metrics-host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="… of this address.")
@store_options
def worker_command(
    app_name: str | None,
    url: str | None,
    processes: int | None,
    log_level: str,
    log_format: str,
    metrics_port: int | None,
    metrics_host: str,
    **options: Any,
) -> None:
    """Run the jobs of some queues. SIGTERM or Ctrl-C ends it when its jobs have ended, a second one at once."""
    from ..supervisor.parent_pipe import supervised

    target = Target(app_name, url, Use.MAKE)
    target.demand_code()
    settings = read_settings(target, processes=processes, **options)
    configure(log_level, log_format)
    unknown = sorted(settings.queues.keys() - target.app.queue_names() - {"default"})
    if unknown:
        logger.warning("no task or declaration of the application names the queue %s", ", ".join(unknown))
    # A process under a supervisor was started by the same command line, and is one of those it asks for.
    leash = supervised(os.environ)
    if processes is not None and leash is None:
        run(_supervise(target, settings, processes))
    else:
        place = None if metrics_port is None else (metrics_host, metrics_port)
        run(_serve(target, settings, options["index"], place, leash))


def read_settings(
    target: Target,
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
    """What the worker is to do: the command line, else the application's settings. All problems are told at once."""
    from ..worker.settings import WorkerSettings

    base = target.app.settings
    attempt = Attempt()
    none: dict[str, int] = {}
    found: dict[str, Any] = {
        "queues": attempt("--queues", lambda: _queues(target, queues), none),
        "slots": _slots(base, slots, reserved, attempt),
        "index": attempt("--index", lambda: _index(base.index, index), None),
        "pool": attempt("--pool", lambda: base.pool if pool is None else check_name("--pool", pool), base.pool),
        "grace": attempt(
            "--grace", lambda: base.grace if grace is None else check_seconds("--grace", grace), base.grace
        ),
    }
    if processes is not None:
        attempt("--processes", lambda: check_count("--processes", processes, least=1, most=MOST_PROCESSES), 1)
    attempt.finish()
    return WorkerSettings(
        **found, manager=not no_manager, burst=burst, intervals=base.intervals, retention=base.retention
    )


def _queues(target: Target, text: str | None) -> dict[str, int]:
    if text is None:
        return target.app.settings.queues or dict.fromkeys(sorted(target.app.queue_names() | {"default"}), 1)
    queues = parse_queues("--queues", text)
    if not queues:
        raise InvalidInput("--queues", "names no queue")
    return queues


def _slots(base: Settings, given: int | None, reserved: str | None, attempt: Attempt) -> Slots:
    usual = base.slots
    total = usual.total if given is None else given
    total = attempt("--slots", lambda: check_count("--slots", total, least=1, most=MOST_SLOTS), usual.total)
    if reserved is not None:
        kept = attempt("--reserved", lambda: _reserved(reserved), Reserved())
        return attempt("--reserved", lambda: Slots(total=total, reserved=kept), usual)
    return attempt("--slots", lambda: usual if given is None else base.slots_for(total), usual)


def _reserved(text: str) -> Reserved:
    kept: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, count = part.partition("=")
        if name not in Reserved.__struct_fields__ or not equals or not count.isdecimal():
            raise InvalidInput("--reserved", f"{part!r} is not like high=1 or normal=2")
        kept[name] = int(count)
    return Reserved(**kept)


def _index(usual: int | None, text: str | None) -> int | None:
    """The index that was named; None while the host's name or the store is to choose."""
    if text is None:
        return usual
    if text in ("auto", "host"):
        return None
    if not text.isdecimal():
        raise InvalidInput("--index", f"{text!r} is neither a number, nor 'host', nor 'auto'")
    return check_count("--index", int(text), least=0, most=1_000_000)


# -- running one -----------------------------------------------------------------------------------------------------


async def _supervise(target: Target, settings: WorkerSettings, processes: int) -> None:
    from ..supervisor.supervisor import Supervisor

    supervisor = Supervisor(
        [sys.executable, "-m", "fairlane", *sys.argv[1:]],
        processes=processes,
        open_store=target.app.open_store,
        intervals=settings.intervals,
        grace=settings.grace,
        until_done=settings.burst,
    )
    if sys.stderr.isatty():
        _greet(target, settings, f"{processes} worker process{'es' if processes > 1 else ''}")
    code = 1
    try:
        await supervisor.run()
        code = 0
    finally:
        end_after(lambda: 0.0, code)


async def _serve(
    target: Target,
    settings: WorkerSettings,
    index: str | None,
    metrics: tuple[str, int] | None,
    leash: Supervised | None,
) -> None:
    from ..supervisor.parent_pipe import PROCESS_NUMBER
    from ..worker.worker import Worker

    app, signals = target.app, Signals(supervised=leash is not None)
    number = int(os.environ.pop(PROCESS_NUMBER, "0"))
    if settings.index is None:
        settings = msgspec.structs.replace(
            settings, index=await choose_index(target, settings, index or "auto", number)
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
        crash_state=leash and leash.crash_state,
        tracer=app.tracer,
        modules=target.modules,
        registered=lambda session: _registered(target, settings, session) if leash is None else None,
        hooks=[each.hooks for each in target.apps],
    )
    signals.end(worker)
    stop_metrics = serve_metrics(target, worker, None if metrics is None else (metrics[0], metrics[1] + number))
    tied = asyncio.ensure_future(_stop_when_alone(worker, leash)) if leash is not None else None
    code = 1
    try:
        await worker.run()
        code = 0
    except asyncio.CancelledError:
        if not signals.asked:
            raise
        code = 0
    finally:
        if tied is not None:
            tied.cancel()
        stop_metrics()
        await target.close()
        ended = time.monotonic()
        end_after(lambda: signals.grace_left(since=ended, grace=settings.grace), code)


async def _stop_when_alone(worker: Worker, leash: Supervised) -> None:
    await leash.parent_pipe.wait()
    logger.warning("the supervisor is gone; finishing what runs")
    worker.stop()


class Signals:
    """The first signal ends a worker in good order, the second at once. One that waits for its index just ends."""

    def __init__(self, *, supervised: bool) -> None:
        # A service manager may signal every process of a service, and the supervisor passes its own signal on: one
        # wish, told twice.
        self._echo_seconds = 1.0 if supervised else 0.0
        self._first_at = 0.0
        self._task = asyncio.current_task()
        self._worker: Worker | None = None
        self.asked = self._again = False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)

    def end(self, worker: Worker) -> None:
        """This is the worker to end."""
        self._worker = worker

    def grace_left(self, *, since: float, grace: float) -> float:
        """Seconds until the grace is over, which began with the first signal, else at `since`; a second one ends it."""
        return 0.0 if self._again else (self._first_at or since) + grace - time.monotonic()

    def _stop(self, number: int) -> None:
        if self.asked and time.monotonic() - self._first_at < self._echo_seconds:
            return
        self._again = self.asked
        self._first_at = self._first_at or time.monotonic()
        words = "handing back what runs" if self.asked else "finishing what runs; once more, and it is handed back"
        logger.info("%s: %s", signal.Signals(number).name, words)
        # One that registers just now goes through with it and leaves again: a session that nobody serves would be
        # given keys and broadcasts until its lease ends.
        if self._worker is not None and (self._worker.ready.is_set() or not self.asked):
            self._worker.stop(now=self.asked)
        elif self._task is not None:
            self._task.cancel()
        self.asked = True


def serve_metrics(target: Target, worker: Worker, place: tuple[str, int] | None) -> Callable[[], None]:
    """Answer Prometheus and health probes if an address is given; answers how to stop."""
    if place is None:
        return lambda: None
    try:
        from ..integrations.prometheus import Metrics
        from ..worker.probes import Readiness
        from ..worker.readiness import unready
    except ModuleNotFoundError as exc:
        raise click.ClickException(str(exc)) from None
    reader = target.app.blocking
    metrics = Metrics(target.app.events, queues=reader.queues, sessions=reader.sessions, counters=reader.counters)
    host, port = place
    try:
        return metrics.serve(port, host, Readiness(lambda: unready(worker), reader.leader))
    except OSError as exc:
        where = f"--metrics-port {port}" + ("" if host == "127.0.0.1" else f" --metrics-host {host}")
        raise click.ClickException(f"{where}: {exc.strerror}; choose another") from None


def _registered(target: Target, settings: WorkerSettings, session: Session) -> None:
    if sys.stderr.isatty():
        _greet(target, settings, f"worker {session.worker}")


def _greet(target: Target, settings: WorkerSettings, name: str) -> None:
    """Say on a terminal what was started; the log follows below."""
    tasks = sorted(task.name for task in target.app.registry)
    queues = ", ".join(f"{queue}={weight}" if weight != 1 else queue for queue, weight in settings.queues.items())
    rows = [
        ("fairlane", plain(name, "bold green")),
        ("store", plain(target.shown_url)),
        ("queues", plain(queues)),
        ("slots", plain(str(settings.slots))),
        ("tasks", plain(", ".join(tasks[:8]) + (f", and {len(tasks) - 8} more" if len(tasks) > 8 else ""))),
        ("stop", plain("Ctrl-C", "dim")),
    ]
    display.error_console().print(display.fields(rows))
