"""The Celery application that a command of ``fairlane celery`` works on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from ..errors import InvalidInput
from ..model.names import shown
from .app_loader import import_named

F = TypeVar("F", bound=Callable[..., Any])


def celery_option(function: F) -> F:
    """Add ``-A``, which names a Celery application as Celery's own command line does."""
    return click.option(
        *("-A", "--app", "app_name"),
        envvar="CELERY_APP",
        show_envvar=True,
        metavar="MODULE:APP",
        help="The Celery application, as in `celery -A`: module or module:app.",
    )(function)


def find_celery_app(app_name: str | None) -> Any:
    """Import a Celery application, also one in the current directory."""
    if app_name is None:
        raise InvalidInput("--app", "is required: give -A module:app, or set CELERY_APP")
    try:
        from celery import Celery
        from celery.app.utils import find_app
    except ModuleNotFoundError:
        raise InvalidInput("--app", "requires Celery: pip install 'fairlane[celery]'") from None
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    location = app_name.partition(":")[0]
    if not all(part.isidentifier() for part in location.split(".")):
        raise InvalidInput("--app", f"{shown(location)} is not a module; give -A module:app")
    module = _module(location)
    try:
        found = find_app(app_name)
    except (ImportError, AttributeError):
        if module is None:
            place = f"in {Path.cwd()} or on the import path; run the command from the project's directory"
            raise InvalidInput("--app", f"no Celery application {shown(app_name)} {place}") from None
        raise InvalidInput("--app", f"no Celery application {shown(app_name)}; {_advice(module, Celery)}") from None
    if not isinstance(found, Celery):
        # `module` alone is its attribute `app`, which may well be the Fairlane application.
        problem = f"{shown(app_name)} is of type {type(found).__name__}, not a Celery application"
        raise InvalidInput("--app", f"{problem}; {_advice(module, Celery)}")
    return found


def _module(name: str) -> ModuleType | None:
    """Import a module; None if there is none of this name, which may end with an attribute."""
    try:
        return import_named(name)
    except ModuleNotFoundError:
        return None


def _advice(module: ModuleType | None, celery: type) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, celery)] if module else []
    known = " or ".join(f"-A {module.__name__}:{name}" for name in names) if module else ""
    return f"use {known}" if known else "give -A module:app"
