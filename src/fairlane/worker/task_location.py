"""The location of a task's function, by which a child process finds it. It comes from the worker's registry.

A module that was run as a script is called ``__main__`` in its process, and is loaded from its file in another one. An
application that uses another store, because of ``--url`` or a lab, uses that store in the child process too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from ..errors import NotSupported
from ..runtime.connection import Connection
from ..store.port import Store
from ..task import Task, registered

SCRIPT = "__fairlane_script__"
"""The module name for a script whose own name belongs to another module, or is not a valid module name."""


class Where(msgspec.Struct, frozen=True):
    """A module and the name in it; `file` is given for a script, `url` is the store of the task's application."""

    module: str
    qualname: str
    file: str | None = None
    url: str | None = None

    @classmethod
    def of(cls, task: Task[..., Any]) -> Where | None:
        """Where another process finds the function of a task; None when it cannot."""
        module = sys.modules.get(task.function.__module__)
        if module is None:
            return None
        try:
            found = _find(module, task.qualname)
        except AttributeError:
            return None
        if (found.function if isinstance(found, Task) else found) is not task.function:
            return None
        url = getattr(getattr(task._sender, "settings", None), "url", None)
        spec = getattr(module, "__spec__", None)
        if spec is not None:
            return cls(spec.name, task.qualname, url=url)
        file = Path(getattr(module, "__file__", None) or "<none>")
        if module.__name__ != "__main__" or not file.is_file():
            return None
        return cls(file.stem, task.qualname, str(file.absolute()), url)

    def find(self, name: str) -> Task[..., Any]:
        """The task at this location, called `name`. Raises what importing its module raises."""
        module = importlib.import_module(self.module) if self.file is None else _load(self.module, self.file)
        found = _find(module, self.qualname)
        if isinstance(found, Task):
            self._move(found)
            return found
        # Registered by a call instead of a decorator: the module's name is bound to the function itself.
        known = registered(name, found)
        if known is not None:
            self._move(known)
            return known
        return Task(None, found, {"name": name})  # type: ignore[arg-type]  # it is run here, never enqueued

    def _move(self, task: Task[..., Any]) -> None:
        """Make the application of a task use the same store as in the worker."""
        app: Any = task._sender
        settings = getattr(app, "settings", None)
        if self.url is not None and settings is not None and settings.url != self.url:
            app.settings = msgspec.structs.replace(settings, url=self.url)


async def store_of(task: Task[..., Any]) -> Store:
    """The store of the application that a task belongs to."""
    connection: Connection | None = getattr(task._sender, "connection", None)
    if connection is None:
        raise NotSupported(
            f"task {task.name} does not know its application in a child process: register it with @app.task, at the "
            "top of its module"
        )
    # Never released: a job that closes the application must not close the store of its transaction.
    return await connection.hold()


def importable(task: Task[..., Any]) -> bool:
    """Whether a child process can find the function of a task."""
    return Where.of(task) is not None


def _find(module: ModuleType, qualname: str) -> Any:
    """What a name in a module is bound to: the task, even below other decorators, or the function."""
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    layer = found
    while layer is not None and not isinstance(layer, Task):
        layer = getattr(layer, "__wrapped__", None)
    return layer or found


def _load(name: str, file: str) -> ModuleType:
    """Import a script as a module: code under ``if __name__ == "__main__"`` does not run."""
    name = name if _is_free(name, file) else SCRIPT
    module = sys.modules.get(name)
    if module is not None:
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded as a module", name=name, path=file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_free(name: str, file: str) -> bool:
    """Whether importing `name` finds this file, or nothing: a script may be called json.py."""
    try:
        known = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return known is None or known.origin == file
