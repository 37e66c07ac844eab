"""Checks Django's database connections around each job. Requires Django.

    from fairlane.integrations.django import install

    app = Fairlane()
    install(app)

Django replaces a connection that has failed, or is too old, when a request begins and when it ends. A worker has no
requests: without these hooks a thread whose connection was lost, such as by a restart of the database, fails every job
that uses the ORM from then on.

A plain function has a thread with connections of its own, which are treated as around a request (``CONN_MAX_AGE``,
``CONN_HEALTH_CHECKS``). All coroutines of a process share the thread in which the asynchronous ORM works, so there only
connections that no longer work are closed: others may be in use by other jobs. Connections inside an atomic block, as
in a ``TestCase``, are left as they are.

A worker in a program of your own (``app.worker()``) sets Django up in its child processes with the settings module of
the program.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from weakref import WeakSet

try:
    from django.apps import apps
    from django.conf import settings
    from django.db import connections
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "fairlane.integrations.django requires Django: pip install django", name=exc.name
    ) from None
from asgiref.sync import sync_to_async

from ..app import Fairlane
from ..runtime.running_job import RunningJob

_installed: WeakSet[Fairlane] = WeakSet()


def install(app: Fairlane) -> None:
    """Check Django's connections around each job of an application. Calling it again changes nothing.

    Call it before `around_job` hooks that use the ORM are declared. `django.setup` need not have been called.
    """
    if app in _installed:
        return
    _installed.add(app)

    app.child_modules.append(_modules_of_children)

    def is_async(job: RunningJob) -> bool:
        task = app.registry.get(job.task)
        return task is not None and task.is_async

    @app.around_job
    def django_connections(job: RunningJob) -> Iterator[None]:
        if is_async(job):
            yield
            return
        _close_old()
        try:
            yield
        finally:
            _close_old()

    @app.around_job
    async def django_async_connections(job: RunningJob) -> AsyncIterator[None]:
        if is_async(job):
            await sync_to_async(_close_unusable)()
        yield


def _modules_of_children() -> Sequence[str]:
    """What sets Django up in a child process: nothing unless this process has done so, from a module of settings."""
    return ["fairlane.integrations.django_setup"] if apps.ready and settings.SETTINGS_MODULE else []


def _close_old() -> None:
    """Close the connections of this thread that have failed or are too old, as Django does around a request."""
    for connection in connections.all(initialized_only=True):
        # Django's own close_old_connections would also close the connection of a TestCase.
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()


def _close_unusable() -> None:
    """Close the connections of this thread that no longer work."""
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and not connection.in_atomic_block and not connection.is_usable():
            connection.close()
