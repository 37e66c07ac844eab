"""Tasks: registered functions, the options their jobs are sent with, and calls that are ready to be sent.

A task is a value. `options()` returns another one with other defaults; options are never mixed with arguments. A `Call`
already has its id, so sending it twice creates one job.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from datetime import datetime, timedelta
from operator import methodcaller
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack
from weakref import WeakSet

from msgspec.structs import force_setattr

from .errors import Control, InvalidInput
from .handle import Handle
from .hooks import Hooks
from .model import foreign_words
from .model.arguments import Arguments
from .model.ids import new_id
from .model.job import NewJob, Priority
from .model.names import check_name, instant, shown
from .model.origin import default_name, module_name
from .model.retry import Backoff
from .model.retry_rule import retry_rule
from .model.schedule import Timetable
from .model.template import Template

if TYPE_CHECKING:
    from .blocking import BlockingHandle

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Seconds = float | timedelta
PriorityWord = Literal["high", "normal", "low"]
_copied: Callable[[NewJob], NewJob] = methodcaller("__copy__")
"""Faster than `copy.copy`, which first looks up how to copy the type."""
logger = logging.getLogger("fairlane.task")


class Options(TypedDict, total=False):
    """How a job is sent. Times are seconds or timedeltas."""

    queue: str
    lane: str | None
    """In `@app.task` a template such as ``user:{user}``; in `options()` the key itself. The same for sticky and unique.
    """
    priority: PriorityWord | Priority
    cost: float
    delay: Seconds
    run_at: datetime | float
    """An aware datetime, or seconds since 1970."""
    expires: Seconds | None
    retries: int
    backoff: Backoff
    timeout: Seconds | None
    unique: str | None
    unique_for: Seconds | None
    pool: str
    sticky: str | None
    worker: int | None


class OneCall(Options, total=False):
    """Options of one call, in addition to those a task can have as defaults."""

    id: str
    """Sending the same id again creates no second job; other content under the same id raises `Conflict`."""


class TaskSettings(Options, total=False):
    """What `@app.task` takes."""

    name: str
    isolate: bool
    """Run in a child process that can be killed. A plain function with a timeout does so too."""
    retry_on: type[BaseException] | Sequence[type[BaseException]]
    """Retry only errors of these classes and their subclasses; any other fails the job immediately."""
    no_retry_on: type[BaseException] | Sequence[type[BaseException]]
    """Errors of these classes and their subclasses fail the job immediately, even if `retry_on` lists them."""
    cron: str
    every: Seconds
    timezone: str


class Sender(Protocol):
    """The part of a client that a task uses."""

    async def enqueue(self, call: Call[T]) -> Handle[T]:
        """Store the job of a call."""

    @property
    def blocking(self) -> BlockingSender:
        """The same for code without an event loop."""


class BlockingSender(Protocol):
    """The part of a blocking client that a task uses."""

    def enqueue(self, call: Call[T]) -> BlockingHandle[T]:
        """Store the job of a call."""


class Call(Generic[R]):
    """A task with its arguments, validated and ready to be sent; it already has its id."""

    __slots__ = ("job", "task")

    def __init__(self, task: Task[..., R], job: NewJob) -> None:
        self.task = task
        self.job = job

    def __repr__(self) -> str:
        return f"<Call of {self.job.task}, id {self.job.id}>"


class Sending(Coroutine[Any, Any, T]):
    """An enqueue that happens when it is awaited. Dropping it without awaiting is logged: no job was stored."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], task: str, depth: int = 2) -> None:
        self._coroutine = coroutine
        self._task = task
        frame = sys._getframe(depth)
        self._site = frame.f_code.co_filename, frame.f_lineno
        self._begun = False

    def __await__(self) -> Generator[Any, Any, T]:
        self._begun = True
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        self._begun = True
        return self._coroutine.send(value)

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> Any:
        self._begun = True
        return self._coroutine.throw(typ) if isinstance(typ, BaseException) else self._coroutine.throw(typ, val, tb)

    def close(self) -> None:
        self._begun = True
        self._coroutine.close()

    def __del__(self) -> None:
        if not self._begun:
            self._coroutine.close()
            message = (
                f"the enqueue of {self._task} at {self._site[0]}:{self._site[1]} was never awaited, so no job was "
                "stored; write `await` before it, or use .blocking.enqueue where there is no event loop"
            )
            if logger.isEnabledFor(logging.ERROR):
                logger.error("%s", message)
            else:
                # `logging.config`, and so Django, disables the loggers that exist when it is called. The loss of a job
                # must not go unnoticed.
                warnings.warn_explicit(message, RuntimeWarning, *self._site)


class Task(Generic[P, R]):
    """A registered function. Call it to run it here; `enqueue` it to run it on a worker."""

    def __init__(
        self,
        sender: Sender,
        function: Callable[P, Any],
        settings: TaskSettings,
    ) -> None:
        rest = dict(settings)
        self._sender = sender
        self.function = function
        self.name = check_name("name", str(rest.pop("name", None) or default_name(function)))
        self.isolate = bool(rest.pop("isolate", False))
        self.hooks: Hooks | None = getattr(sender, "hooks", None)
        """The hooks of its application."""
        self.retry_rule = retry_rule(rest.pop("retry_on", None), rest.pop("no_retry_on", None))
        self.timetable = _timetable(rest)
        self.arguments = Arguments(function)
        self.module, self.qualname = module_name(function), function.__qualname__
        self._templates: dict[str, Template] = {}
        for field in ("lane", "sticky", "unique"):
            text = rest.get(field)
            if text is not None:
                template = Template(field, str(text), self.arguments.names)
                if not template.constant:
                    self._templates[field] = template
                    del rest[field]
        self._fields = _fields(rest)
        self._given: dict[str, Any] = {}
        self.is_async = inspect.iscoroutinefunction(function)
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        # Everything that does not depend on the arguments is validated now, not at the first enqueue.
        self._pattern = NewJob(id="check", task=self.name, **self._fields)
        self._check_importable(self._fields)
        if self.timetable is not None:
            self._check_cron()

    @property
    def queue(self) -> str:
        """The queue of its jobs."""
        return str(self._fields.get("queue", "default"))

    @property
    def lane(self) -> str | None:
        """The lane of its jobs: a key, or a template such as ``user:{user}``; None without one."""
        template = self._templates.get("lane")
        return self._pattern.lane if template is None else template.text

    @property
    def usual(self) -> NewJob:
        """The defaults of its jobs; the id, the payload and templates are not filled in."""
        return self._pattern

    @property
    def chosen(self) -> frozenset[str]:
        """The options that were set by `@app.task` or `options()`; the others have their defaults."""
        return frozenset((*self._fields, *self._templates, *self._given))

    def options(self, **options: Unpack[OneCall]) -> Self:
        """The same task with other options. Keys are used literally, not as templates."""
        given: dict[str, Any] = dict(options)
        for field in ("lane", "sticky", "unique"):
            text = given.get(field)
            if isinstance(text, str) and any(f"{{{name}}}" in text for name in self.arguments.names):
                raise InvalidInput(
                    field, f"{shown(text)} is used literally in options(); templates belong in @app.task"
                )
        other = self.__class__.__new__(self.__class__)
        other.__dict__.update(self.__dict__)
        fields = _fields({k: v for k, v in given.items() if k != "id"})
        if "delay" in given:
            fields.setdefault("run_at", None)
        if "run_at" in given:
            fields.setdefault("delay", 0.0)
        other._fields = self._fields | fields
        other._templates = {k: v for k, v in self._templates.items() if k not in given}
        other._given = {"id": given["id"]} if "id" in given else self._given
        other._pattern = NewJob(id=str(other._given.get("id", "check")), task=self.name, **other._fields)
        other._check_importable(other._fields)
        return other

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """The call as a value, for `enqueue_many`, a broadcast or a clean-up."""
        id = self._given.get("id") or new_id()
        if not self._templates:
            try:
                self.arguments.check(args, kwargs)
            except TypeError as exc:
                raise self._bad_argument(exc, kwargs) from None
            # The pattern was validated already; only the id and the payload are new, and both are valid.
            job = _copied(self._pattern)
            force_setattr(job, "id", id)
            force_setattr(job, "payload", self.arguments.write(args, kwargs))
            return Call(self, job)
        try:
            bound = self.arguments.bind(args, kwargs)
        except TypeError as exc:
            raise self._bad_argument(exc, kwargs) from None
        keys: dict[str, Any] = {field: template.fill(bound) for field, template in self._templates.items()}
        payload = self.arguments.write(args, kwargs)
        return Call(self, NewJob(id=id, task=self.name, payload=payload, **self._fields, **keys))

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Sending[Handle[R]]:
        """Store a job that runs this task; await it for the handle. Invalid arguments raise immediately."""
        return Sending(self._sender.enqueue(self.call(*args, **kwargs)), self.name)

    @property
    def blocking(self) -> BlockingTask[P, R]:
        """The same for code without an event loop: ``task.blocking.enqueue(…)``."""
        return BlockingTask(self._sender, self)

    def read_result(self, raw: bytes | None) -> R:
        """Decode a stored result into the annotated return type."""
        result: R = self.arguments.result.read(raw if raw is not None else b"null")
        return result

    @property
    def bare(self) -> bool:
        """Whether only its function is known, and not its settings: in a child process."""
        return self._sender is None

    def allows_retry(self, exc: BaseException) -> bool:
        """Whether `retry_on` and `no_retry_on` allow a retry after this error. Control errors are always allowed."""
        return self.retry_rule is None or isinstance(exc, Control) or self.retry_rule.allows(exc)

    def _bad_argument(self, exc: TypeError, kwargs: dict[str, Any]) -> TypeError:
        return foreign_words.bad_argument(exc, self.__name__, kwargs, self.arguments.names, OneCall.__annotations__)

    if not TYPE_CHECKING:
        # Hidden from type checkers, so that they report unknown attributes.
        def __getattr__(self, name: str) -> Any:
            called = self.__dict__.get("__name__", "task")
            raise foreign_words.no_attribute(self, f"task {called!r}", name, foreign_words.TASK, called)

    def _check_importable(self, fields: dict[str, Any]) -> None:
        """A task that runs in a child process must be importable there. A plain function with a timeout runs in one,
        because a thread cannot be stopped.
        """
        timed = not self.is_async and fields.get("timeout") is not None
        if (self.isolate or timed) and "<locals>" in self.qualname:
            raise InvalidInput(
                "timeout" if timed else "isolate",
                f"{self.name} would run in a child process, which cannot import a function defined inside another; "
                "move it to the top level of its module" + (", or make it a coroutine function" if timed else ""),
            )

    def _check_cron(self) -> None:
        try:
            self.arguments.bind((), {})
        except TypeError:
            raise InvalidInput(
                "cron", f"{self.name} is run without arguments, so every parameter needs a default"
            ) from None

    def __repr__(self) -> str:
        return f"<Task {self.name}>"


class BlockingTask(Generic[P, R]):
    """A task for code without an event loop."""

    __slots__ = ("_sender", "_task")

    def __init__(self, sender: Sender, task: Task[P, R]) -> None:
        self._sender = sender
        self._task = task

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> BlockingHandle[R]:
        """Store a job that runs the task."""
        return self._sender.blocking.enqueue(self._task.call(*args, **kwargs))


class AsyncTask(Task[P, R]):
    """A task whose function is a coroutine function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run the function here, as if it were not a task."""
        running: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return running


class PlainTask(Task[P, R]):
    """A task with a plain function; a worker runs it in a thread or in a child process."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here, as if it were not a task."""
        value: R = self.function(*args, **kwargs)
        return value


class Registry:
    """The tasks of an application, by name. Names in stored jobs are looked up only here."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        _registries.add(self)

    def add(self, task: Task[..., Any]) -> None:
        """Register a task. Raises `InvalidInput` for a second one of the same name."""
        known = self._tasks.get(task.name)
        if known is not None and (known.module, known.qualname) != (task.module, task.qualname):
            raise InvalidInput("name", f"two tasks are named {task.name!r}; give one of them name=…")
        self._tasks[task.name] = task

    def get(self, name: str) -> Task[..., Any] | None:
        """The task of this name; None if there is none."""
        return self._tasks.get(name)

    def find(self, name: str) -> Task[..., Any]:
        """The task of this name, or the only one whose last part is `name`; for names that people type."""
        task = self._tasks.get(name)
        if task is not None:
            return task
        close = [t for t in self if t.name.rpartition(".")[2] == name]
        if len(close) == 1:
            return close[0]
        known = ", ".join(sorted(t.name for t in close or self)) or "none"
        raise InvalidInput("task", f"{shown(name)} is not a task of this application (tasks: {known})")

    def queues(self) -> set[str]:
        """The queues that its tasks use."""
        return {task.queue for task in self}

    def __iter__(self) -> Iterator[Task[..., Any]]:
        return iter(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)


_registries: WeakSet[Registry] = WeakSet()


def registered(name: str, function: Callable[..., Any]) -> Task[..., Any] | None:
    """The task of this name that runs `function`, in any application of this process."""
    tasks = [task for registry in list(_registries) if (task := registry.get(name)) is not None]
    return next((task for task in tasks if task.function is function), None)


def _timetable(rest: dict[str, Any]) -> Timetable | None:
    cron, every, timezone = rest.pop("cron", None), rest.pop("every", None), rest.pop("timezone", None)
    if cron is None and every is None:
        if timezone is not None:
            raise InvalidInput("timezone", "requires cron=")
        return None
    return Timetable(cron=cron, every=None if every is None else seconds("every", every), timezone=timezone or "UTC")


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """Convert options to fields of a `NewJob`."""
    fields = dict(options)
    for name in ("delay", "expires", "timeout", "unique_for"):
        if fields.get(name) is not None:
            fields[name] = seconds(name, fields[name])
    priority = fields.get("priority")
    if priority is not None and not isinstance(priority, Priority):
        fields["priority"] = Priority.parse(priority)
    if "run_at" in fields:
        fields["run_at"] = instant("run_at", fields["run_at"])
    unknown = fields.keys() - set(NewJob.__struct_fields__)
    if unknown:
        known = ", ".join(sorted({*TaskSettings.__annotations__, *OneCall.__annotations__}))
        named = sorted(unknown, key=lambda name: (name not in foreign_words.OPTION, name))[0]
        if named in TaskSettings.__annotations__:
            raise InvalidInput(named, "is set in @app.task(…), for all calls of the task")
        raise InvalidInput(named, f"is not an option; {foreign_words.OPTION.get(named) or f'options are {known}'}")
    return fields


def seconds(field: str, value: Seconds) -> float:
    """Convert a duration to seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value
