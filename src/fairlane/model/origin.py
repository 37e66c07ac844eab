"""Where functions and classes come from, under the names that every process knows them by."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def module_name(function: Callable[..., Any]) -> str:
    """The module a function or class lives in, under the name others import it by, also when it was run as a script."""
    module = function.__module__
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    # A program read from standard input calls its file "<stdin>".
    return Path(file).stem if file and not file.startswith("<") else module


def class_names(kind: type) -> tuple[str, ...]:
    """The dotted names of a class and of those it is made from, itself first."""
    return tuple(f"{module_name(each)}.{each.__qualname__}" for each in kind.__mro__)


def default_name(function: Callable[..., Any]) -> str:
    """``module.function``."""
    return f"{module_name(function)}.{function.__name__}"
