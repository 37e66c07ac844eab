"""Modules that contain tasks: those that an application names, and those found in a package.

The search imports only the parents of the modules it finds, so a package may contain modules that a worker must not
import.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import InvalidInput
from ..model.names import shown

TASKS = "tasks"


def check_module(field: str, name: Any) -> str:
    """Check the dotted name of a module, as in an ``import`` statement."""
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise InvalidInput(field, f"{shown(name)} is not the dotted name of a module, such as 'artbot.tasks'")
    return name


def import_named(field: str, name: str) -> None:
    """Import a module; if it does not exist, the error names the option of the application."""
    try:
        import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        raise InvalidInput(field, f"module {name!r} was not found on Python's import path") from None


def task_modules(package: str) -> list[str]:
    """The modules of a package that are called ``tasks``, at any depth, and all modules of packages with that name."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise InvalidInput("autodiscover", f"package {package!r} was not found on Python's import path")
    if spec.submodule_search_locations is None:
        raise InvalidInput("autodiscover", f"{package!r} is a module, not a package; name it in include= instead")
    found = list(_below(package, list(spec.submodule_search_locations), package.rpartition(".")[2] == TASKS))
    if not found:
        raise InvalidInput(
            "autodiscover",
            f"package {package!r} has no module called {TASKS!r}; every folder above one needs an __init__.py",
        )
    return found


def _below(package: str, paths: list[str], inside: bool) -> Iterator[str]:
    if inside:
        yield package
    for module in sorted(pkgutil.iter_modules(paths), key=lambda each: each.name):
        name = f"{package}.{module.name}"
        wanted = inside or module.name == TASKS
        if module.ispkg:
            # By the finder itself: importlib would import the parents.
            spec = module.module_finder.find_spec(module.name, None)
            if spec is not None and spec.submodule_search_locations is not None:
                yield from _below(name, list(spec.submodule_search_locations), wanted)
        elif wanted:
            yield name
