"""Module and class names of functions, equal in every process, also when a module was run as a script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def module_name(function: Callable[..., Any]) -> str:
    """The module of a function or class, by the name it is imported by, also when it was run as a script."""
    module = function.__module__
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    # For a program read from standard input, `__file__` is "<stdin>".
    return Path(file).stem if file and not file.startswith("<") else module


def class_names(kind: type) -> tuple[str, ...]:
    """The dotted names of a class and its bases, in method resolution order."""
    return tuple(f"{module_name(each)}.{each.__qualname__}" for each in kind.__mro__)


def default_name(function: Callable[..., Any]) -> str:
    """``module.function``."""
    return f"{module_name(function)}.{function.__name__}"
