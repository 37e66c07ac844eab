"""Imports the application that ``-A`` names, from a module or from a file.

The current directory comes first on the import path, as with ``python -m``. A file inside a package is imported by its
dotted name, any other file by its stem with its directory on the path, so that the child processes of a worker can
import it too. Errors show the user's own frames only, or one sentence where `django.setup` is missing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click

from ..app import Fairlane
from ..errors import InvalidInput
from ..model.names import shown
from ..runtime.logs import escaped

SHOWN_FRAMES = 6
NOT_SET_UP = (
    "set DJANGO_SETTINGS_MODULE and call django.setup() in a module of its own that then imports the application, and "
    "name that module with -A; see docs/howto/django.md"
)


class BrokenModule(click.ClickException):
    """The user's module was found and raised an error while it was imported."""

    def __init__(self, module: str, error: BaseException) -> None:
        if _lacks_django_setup(error):
            problem = escaped(str(error).partition(". ")[0].rstrip("."))
            super().__init__(f"{module} was imported before Django was set up ({problem}); {NOT_SET_UP}")
        else:
            super().__init__(f"{module} could not be imported:\n{_own_traceback(error)}")


def find_apps(names: Sequence[str]) -> dict[str, Fairlane]:
    """Return the applications with these names, each once, with their task modules imported.

    A name is ``module``, ``module:app``, ``path/file.py`` or ``path/file.py:app``. A module without an application is
    accepted beside others if it declares tasks for one of them.
    """
    apps: dict[str, Fairlane] = {}
    without: list[ModuleType] = []
    for name in names:
        module, attribute = find_module(name), name.partition(":")[2]
        if not attribute and not _apps_in(module):
            without.append(module)
            continue
        app = _in_module(module, attribute)
        if not any(app is known for known in apps.values()):
            apps[name] = app
    for module in without:
        if not any(task.module == module.__name__ for app in apps.values() for task in app.registry):
            _in_module(module, "")  # raises the error
    for app in apps.values():
        for field, name in app._task_modules():
            _include(field, name)
    return apps


def find_module(name: str) -> ModuleType:
    """Import the module part of a name. Its ``__name__`` is what other processes import it by."""
    location = name.partition(":")[0]
    cwd = str(Path.cwd())
    if cwd not in sys.path and "" not in sys.path:
        sys.path.insert(0, cwd)
    if location.endswith(".py") or "/" in location:
        return _from_file(Path(location))
    return _from_name(location)


def _include(field: str, name: str) -> None:
    try:
        import_named(name)
    except ModuleNotFoundError:
        raise InvalidInput(
            field,
            f"no module {name!r} in {Path.cwd()} or on the import path; run the command from the project's directory",
        ) from None


def _apps_in(module: ModuleType) -> dict[str, Fairlane]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Fairlane)}


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidInput("--app", f"no file {shown(str(path))} in {Path.cwd()}")
    path = path.resolve()
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module = import_named(".".join(parts))
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise InvalidInput(
            "--app", f"{path.name} cannot be imported as {module.__name__!r}: that name is {found}; rename the file"
        )
    return module


def _from_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidInput("--app", f"{shown(name)} is not a module; write module:app or path/to/file.py:app")
    try:
        return import_named(name)
    except ModuleNotFoundError:
        file = Path(*name.split(".")).with_suffix(".py")
        nearby = sorted(str(p) for p in Path.cwd().glob(f"*/{file}"))[:1]
        hint = (
            f"did you mean -A {nearby[0]}?"
            if nearby
            else "run the command from the project's directory, or name the file: -A path/to/file.py"
        )
        raise InvalidInput("--app", f"no module {name!r} in {Path.cwd()} or on the import path; {hint}") from None


def import_named(name: str) -> ModuleType:
    """Import a module. ModuleNotFoundError means that this module is missing, not one that it imports."""
    try:
        return import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and f"{name}.".startswith(f"{exc.name}."):
            raise
        raise BrokenModule(name, exc) from exc
    except (Exception, SystemExit) as exc:
        raise BrokenModule(name, exc) from exc


def _in_module(module: ModuleType, attribute: str) -> Fairlane:
    apps = _apps_in(module)
    if not attribute:
        distinct = {id(app): app for app in apps.values()}
        if len(distinct) == 1:
            return next(iter(distinct.values()))
        if distinct:
            names = ", ".join(f"{module.__name__}:{name}" for name in apps)
            raise InvalidInput("--app", f"{module.__name__} has several applications; name one of them: {names}")
        raise InvalidInput("--app", f"{module.__name__} has no application (app = Fairlane()); {_names_in(module)}")
    value: object = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if isinstance(value, Fairlane):
        return value
    problem = f"has no {shown(attribute)}"
    if value is not None:
        problem = f"has {shown(attribute)}, but it is of type {type(value).__name__}, not a Fairlane application"
    known = " or ".join(f"-A {module.__name__}:{app}" for app in apps)
    raise InvalidInput("--app", f"{module.__name__} {problem}; {f'use {known}' if apps else _names_in(module)}")


def _names_in(module: ModuleType) -> str:
    names = [name for name in vars(module) if not name.startswith("_")]
    return f"it defines {', '.join(names[:12])}{', …' if len(names) > 12 else ''}" if names else "it is empty"


def _lacks_django_setup(error: BaseException) -> bool:
    """Whether a module was imported before Django was set up, or while it was. Does not import Django."""
    match type(error).__module__, type(error).__name__:
        case "django.core.exceptions", "AppRegistryNotReady":
            return True
        case "django.core.exceptions", "ImproperlyConfigured":
            return "settings are not configured" in str(error)
        case "builtins", "RuntimeError":
            return str(error) == "populate() isn't reentrant"
    return False


def _own_traceback(error: BaseException) -> str:
    """Format the last frames of the user's own code, without those of the import system."""
    formatted = traceback.TracebackException.from_exception(error, compact=True)
    frames = [f for f in formatted.stack if not f.filename.startswith("<frozen") and f.filename != __file__]
    frames = [f for f in frames if not f.filename.endswith("importlib/__init__.py")]
    lines = traceback.StackSummary.from_list(frames[-SHOWN_FRAMES:]).format() + list(formatted.format_exception_only())
    return "\n".join(escaped(line) for chunk in lines for line in chunk.rstrip("\n").split("\n"))
