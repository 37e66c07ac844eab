"""Where the function of a task is, told by one process so that another finds it. The address comes from the registry.

A module that was run as a script has another name there than everybody else knows it by, and is loaded from its file.
An application that was moved to another store, by ``--url`` or by a lab, is moved there too.
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
"""The name of a script whose own name belongs to another module, or is none a module can have."""


class Where(msgspec.Struct, frozen=True):
    """A module and the name in it; `file` is given for a script, `url` is the store of the task's application."""

    module: str
    qualname: str
    file: str | None = None
    url: str | None = None

    @classmethod
    def of(cls, task: Task[..., Any]) -> Where | None:
        """Where another process finds the function of a task; None when it could not."""
        module = sys.modules.get(task.function.__module__)
        if module is None:
            return None
        try:
            found = _look(module, task.qualname)
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
        """The task that is there, by this `name`. Raises whatever importing its module raises."""
        module = importlib.import_module(self.module) if self.file is None else _load(self.module, self.file)
        found = _look(module, self.qualname)
        if isinstance(found, Task):
            self._move(found)
            return found
        # Registered by a call instead of a decorator: the name still stands for the function itself.
        known = registered(name, found)
        if known is not None:
            self._move(known)
            return known
        return Task(None, found, {"name": name})  # type: ignore[arg-type]  # it is run here, never enqueued

    def _move(self, task: Task[..., Any]) -> None:
        """Let the application of a task use the store that it uses where the job comes from."""
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
    # Never released: a body that closes the application must not close the store of its transaction.
    return await connection.hold()


def importable(task: Task[..., Any]) -> bool:
    """Whether a child process can find the function of a task."""
    return Where.of(task) is not None


def _look(module: ModuleType, qualname: str) -> Any:
    """What a module calls by this name: the task, also when other decorators stand above it, or the function."""
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    layer = found
    while layer is not None and not isinstance(layer, Task):
        layer = getattr(layer, "__wrapped__", None)
    return layer or found


def _load(name: str, file: str) -> ModuleType:
    """A script as a module: what stands under ``if __name__ == "__main__"`` does not run."""
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
    """Whether everybody who imports `name` would mean this file, or nothing: a script may be called json.py."""
    try:
        known = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return known is None or known.origin == file
