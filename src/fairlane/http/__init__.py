"""The HTTP service: submit, watch and operate jobs from any language. Requires the extra ``fairlane[http]``.

Names are imported on first use, so that importing this package requires neither FastAPI nor httpx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .application import create_app, service_of
    from .client import AccessDenied, AsyncClient, Client
    from .instance import serve_app
    from .settings import HttpSettings

__all__ = ["AccessDenied", "AsyncClient", "Client", "HttpSettings", "create_app", "serve_app", "service_of"]

_HOMES = {
    "AccessDenied": "client",
    "AsyncClient": "client",
    "Client": "client",
    "HttpSettings": "settings",
    "create_app": "application",
    "serve_app": "instance",
    "service_of": "application",
}
_LIBRARIES = frozenset({"fastapi", "starlette", "uvicorn", "httpx"})


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f".{home}", __name__), name)
    except ModuleNotFoundError as exc:
        if exc.name in _LIBRARIES:
            raise ModuleNotFoundError(
                f"fairlane.http requires {exc.name}: pip install 'fairlane[http]'", name=exc.name
            ) from None
        raise
