"""Sticky plans: all tasks of a key run on one Celery worker, until the key is released."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
from celery import Celery
from celery.canvas import Signature
from celery.result import AsyncResult

from ...app import Fairlane
from ...errors import InvalidInput
from ...model.binding import Binding, BindingState, Release
from ...model.job import JobKind, JobState, NewJob
from ...model.names import check_key, check_name, check_seconds
from ...model.session import Session, SessionKind, SessionState
from .applications import fairs
from .fair import Fair
from .messages import KEY, LANE, TTL
from .publishing import Publish, captured

logger = logging.getLogger("fairlane.celery")
DEFAULT_TTL = 3_600.0
LISTED = 500
"""How many bindings a list has at most."""
LOOK_SECONDS = 0.1


class Broadcast:
    """A task that runs once on every worker of the pool. Each run is acknowledged by the worker's own copy."""

    def __init__(self, fair: Fair, result: AsyncResult) -> None:
        self._fair = fair
        self.id = str(result.id)
        self.result = result
        """Celery's result, which all workers write: a success stays."""

    def states(self) -> dict[int, JobState]:
        """The state of each worker's copy, by index."""
        copies = self._fair.wait(lambda: self._fair.fairlane.client.children(self.id))
        return {int(copy.id.rpartition("/")[2]): copy.state for copy in copies}

    def _has_ended(self) -> bool:
        return self._fair.wait(lambda: self._fair.fairlane.client.job(self.id)).state.final

    def wait(self, timeout: float | None = None) -> dict[int, JobState]:
        """Wait until every copy has ended, and return how. Raises `TimeoutError`.

        Copies for workers that join later are not waited for, unless there is none yet.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            ended, states = self._has_ended(), self.states()
            if ended or (states and all(state.final for state in states.values())):
                return states
            if until is not None and time.monotonic() >= until:
                waiting = sorted(index for index, state in states.items() if not state.final)
                raise TimeoutError(f"broadcast {self.id} has not ended on workers {waiting}")
            time.sleep(LOOK_SECONDS)


class StickyRouter:
    """Sends the tasks of a Celery application to the workers of the pool `org`.

        router = StickyRouter(celery_app, Fairlane("redis://"), org="org")
        router.enqueue(prepare.s(7), key="plan-7")

    The queues ``{org}.worker``, ``{org}.worker-{i}`` and ``{org}.broadcast`` mean any worker, worker *i* and every
    worker, for `enqueue` and `broadcast` as for a plain `apply_async(queue=…)` or a route. Other queues are not
    affected; they are fair only if `Fair` was called before, and names them. A worker that joins within `ttl` seconds
    after a broadcast runs it too.
    """

    def __init__(self, app: Celery, fairlane: Fairlane, *, org: str, ttl: float = DEFAULT_TTL) -> None:
        self.org = check_name("org", org)
        self.ttl = check_seconds("ttl", ttl)
        self.app = app
        self.fair = fairs[app] if app in fairs else Fair(app, fairlane, queues=[])
        if self.fair.fairlane is not fairlane:
            raise InvalidInput("fairlane", "must be the application that Fair was called with")
        if self.fair.router is not None:
            raise InvalidInput("app", f"StickyRouter was called twice for {app.main or 'this application'}")
        self.any_worker = f"{org}.worker"
        """The queue of any worker."""
        self.every_worker = f"{org}.broadcast"
        """The queue of every worker."""
        self._one_worker = re.compile(re.escape(self.any_worker) + r"-(0|[1-9]\d{0,6})")
        self.releases: Counter[Release] = Counter()
        """The answers of `release` in this process."""
        self.fair.router = self
        app.user_options["worker"].add(
            click.Option(
                ["--index"],
                metavar="N|host|auto",
                help=f"Its index in the pool {org}. auto: the number at the end of the host name, if free.",
            )
        )

    # -- names ---------------------------------------------------------------------------------------------------

    def one_worker(self, index: int) -> str:
        """The queue of one worker."""
        return f"{self.any_worker}-{index}"

    def index_of(self, queue: str) -> int | None:
        """The index of the worker whose queue it is; None for any other queue."""
        found = self._one_worker.fullmatch(queue)
        return None if found is None else int(found[1])

    def owns(self, queue: str) -> bool:
        """Whether a queue is one of the pool's names."""
        return queue in (self.any_worker, self.every_worker) or self.index_of(queue) is not None

    # -- sending -------------------------------------------------------------------------------------------------

    def enqueue(
        self,
        task: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: str,
        **options: Any,
    ) -> AsyncResult:
        """Send a task, a signature or a canvas to the worker of a key, which is bound to one if it is not.

        Takes the options of `apply_async`. In a canvas every task has the key.
        """
        check_key("key", key)
        signature = self._signature(task, args, kwargs)
        return self._with_key(signature, key).apply_async(**options)

    def broadcast(
        self,
        task: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        ttl: float | None = None,
        **options: Any,
    ) -> Broadcast:
        """Run a task or a signature once on every live worker, and on those that join within `ttl` seconds."""
        if ttl is not None:
            options[TTL] = check_seconds("ttl", ttl)
        signature = self._signature(task, args, kwargs)
        if hasattr(signature, "tasks"):
            raise InvalidInput("task", "must be one task or its signature, not a chain, group or chord")
        return Broadcast(self.fair, signature.apply_async(queue=self.every_worker, **options))

    def release(self, key: str, *, cleanup: Signature | None = None) -> Release:
        """Release a key: once no task of it waits or runs, `cleanup` runs last and alone on its worker.

        Answers `nothing` if the key is not bound, and then `cleanup` does not run. Repeating a release changes nothing.
        """
        check_key("key", key)
        job = None if cleanup is None else self._cleanup(cleanup)

        async def release() -> Release:
            store = await self.fair.fairlane.connection.store()
            return await store.release(self.org, key, job)

        answer = self.fair.wait(release)
        self.releases[answer] += 1
        logger.info("release of key %s in pool %s: %s", key, self.org, answer.value)
        return answer

    def _signature(self, task: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Signature:
        if isinstance(task, Signature):
            if args is not None or kwargs is not None:
                raise InvalidInput("args", "a signature has its arguments already")
            return task
        if not hasattr(task, "signature"):
            raise InvalidInput("task", f"must be a task or a signature of Celery, not a {type(task).__name__}")
        signature: Signature = task.signature(args or (), dict(kwargs or {}))
        return signature

    def _with_key(self, signature: Signature, key: str) -> Signature:
        """A copy of a signature in which every task is for the worker of the key."""
        copy = signature.clone()
        inner = getattr(copy, "tasks", None)
        if inner is None:
            return copy.set(queue=self.any_worker, **{KEY: key})
        tasks = [self._with_key(each, key) for each in inner]
        if copy.get("subtask_type") == "chord":
            copy.tasks, copy.body = tasks, self._with_key(copy.body, key)
        else:
            copy["kwargs"] = {**copy["kwargs"], "tasks": tasks}
        return copy

    def _cleanup(self, cleanup: Signature) -> NewJob:
        if not isinstance(cleanup, Signature) or hasattr(cleanup, "tasks"):
            raise InvalidInput("cleanup", "must be the signature of one task, such as delete.si(7)")
        if self.app.conf.task_always_eager:
            raise InvalidInput("cleanup", "does not work with task_always_eager, which would run it here")
        with captured() as publishes:
            cleanup.apply_async(queue=self.any_worker)
        if len(publishes) != 1:
            raise InvalidInput("cleanup", "must be a signature of the router's own application")
        [publish] = publishes
        job = publish.job(publish.id, None)
        return msgspec.structs.replace(job, kind=JobKind.CLEANUP)

    # -- reading -------------------------------------------------------------------------------------------------

    def workers(self) -> list[Session]:
        """The live workers of the pool, by index."""
        sessions = self.fair.wait(self.fair.fairlane.client.sessions)
        live = (SessionState.LIVE, SessionState.STOPPING)
        mine = [s for s in sessions if s.kind is SessionKind.WORKER and s.pool == self.org and s.state in live]
        return sorted(mine, key=lambda session: session.index or 0)

    def bindings(self) -> list[Binding]:
        """The bindings that are not closed, by index and key."""
        client = self.fair.fairlane.client
        found = self.fair.wait(lambda: client.bindings(self.org, limit=LISTED))
        bound = [b for b in found if b.state in (BindingState.OPEN, BindingState.DRAINING)]
        return sorted(bound, key=lambda binding: (binding.index, binding.key))

    def history(self, key: str) -> list[Binding]:
        """All bindings of a key that are kept, the oldest first."""
        check_key("key", key)
        client = self.fair.fairlane.client
        found = self.fair.wait(lambda: client.bindings(self.org, key, limit=LISTED))
        return sorted(found, key=lambda binding: binding.opened_at)

    # -- called by publishes -------------------------------------------------------------------------------------

    def assign(self, job: NewJob, publish: Publish) -> NewJob:
        """The job of a publish, on the workers that its queue and its key mean."""
        asked = publish.asked
        key, ttl, index = asked.get(KEY), asked.get(TTL), self.index_of(job.queue)
        if ttl is not None and job.queue != self.every_worker:
            raise InvalidInput(TTL, f"only a broadcast to {self.every_worker} has one")
        if job.queue == self.every_worker:
            if key is not None:
                raise InvalidInput(KEY, "a broadcast goes to every worker, and has no key")
            return msgspec.structs.replace(
                job,
                kind=JobKind.BROADCAST,
                pool=self.org,
                # The lane of its parent or tenant does not apply; one that was asked for is refused.
                lane=asked.get(LANE),
                ttl=self.ttl if ttl is None else ttl,
            )
        if index is not None:
            # A task that publishes to the queue it came from continues its plan.
            inherited = publish.parent_key
            if key is not None and key != inherited:
                raise InvalidInput(KEY, f"give either a key or the queue of one worker, not {job.queue}")
            if inherited is None:
                return msgspec.structs.replace(job, pool=self.org, worker=index)
            key = inherited
        elif job.queue != self.any_worker:
            if key is not None:
                raise InvalidInput(KEY, f"only tasks for {self.any_worker} have a key, not those for {job.queue}")
            return job
        return msgspec.structs.replace(job, queue=self.any_worker, pool=self.org, sticky=key)
