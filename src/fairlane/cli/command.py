"""What all commands have in common: how they name an application and a store, and how an error looks.

An error of Fairlane is one line on standard error that says what to do next. The exit code is 2 for input that was
refused and 1 for everything else. Only ``--debug`` shows a traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from .. import event_loops
from ..errors import FairlaneError, InvalidInput, NotFound, SchemaMismatch, StoreMissing, StoreUnavailable
from ..runtime.logs import FORMATS, LEVELS, escaped

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# What a store has to say of its server belongs into the logs of processes that stay. Whoever asks for the state of a
# queue did not ask for it, and the doctor tells it.
logging.getLogger("fairlane.store").addHandler(logging.NullHandler())

NEXT_STEPS: dict[type[FairlaneError], str] = {
    NotFound: "`fairlane jobs` and `fairlane queues` list what there is",
    StoreUnavailable: "nothing is lost; try again, or let `fairlane doctor` look",
    StoreMissing: "a worker, `fairlane enqueue` or `fairlane migrate` makes it; --url, -A or FAIRLANE_URL name another",
    SchemaMismatch: "`fairlane migrate` brings an older store up to date; a newer one needs a newer fairlane",
}


class Failure(click.ClickException):
    """An error of Fairlane as the command line tells it."""

    def __init__(self, error: FairlaneError) -> None:
        lines = " ".join(str(error).split("\n"))
        hint = next((step for kind, step in NEXT_STEPS.items() if isinstance(error, kind)), None)
        super().__init__(escaped(lines) + (f" ({hint})" if hint else ""))


class Refusal(Failure):
    """Input that was refused."""

    exit_code = 2


class Command(click.Command):
    """A command that tells errors in one line, unless ``--debug`` asks for more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, help="Show tracebacks of errors."))

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        debug = ctx.params.pop("debug")
        try:
            return super().invoke(ctx)
        except FairlaneError as exc:
            if debug:
                raise
            raise (Refusal if isinstance(exc, InvalidInput) else Failure)(exc) from exc


class _AppName(click.types.StringParamType):
    """What ``-A`` takes. In the variable several of them are separated as those of ``-Q`` are."""

    envvar_list_splitter = ","


def app_option(function: F) -> F:
    """``-A``, which names the application; the value is handed over as `app_name`, of several separated by commas."""
    return click.option(
        *("-A", "--app", "app_name"),
        type=_AppName(),
        multiple=True,
        callback=lambda _ctx, _option, names: ",".join(name for name in names if name) or None,
        envvar="FAIRLANE_APP",
        show_envvar=True,
        metavar="MODULE:APP",
        help="The application: module, module:app, or path/to/file.py:app. Several are served as one.",
    )(function)


def url_option(function: F) -> F:
    """``--url``, which names the store. The environment variable is read with the other settings."""
    return click.option(
        "--url",
        metavar="URL",
        help="The store; else the application's, else FAIRLANE_URL, else sqlite:///fairlane.db.",
    )(function)


def store_options(function: F) -> F:
    """``-A`` and ``--url``, for commands that need no user code but may take its store from there."""
    return app_option(url_option(function))


def log_options(function: F) -> F:
    """``--log-level`` and ``--log-format``, for commands that stay."""
    level = click.option(
        *("--log-level", "-l"),
        type=click.Choice(LEVELS, case_sensitive=False),
        default="info",
        envvar="FAIRLANE_LOG_LEVEL",
        show_default=True,
        show_envvar=True,
        help="The least level that is written. info has a line for every job that ends.",
    )
    format = click.option(
        "--log-format",
        type=click.Choice(FORMATS),
        default="text",
        envvar="FAIRLANE_LOG_FORMAT",
        show_default=True,
        show_envvar=True,
        help="As text for people, or one JSON object a line.",
    )
    return level(format(function))


def json_option(function: F) -> F:
    """``--json``, handed over as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Answer with one JSON document.")(function)


def run(work: Awaitable[T]) -> T:
    """Run one command's coroutine."""

    async def body() -> T:
        return await work

    return event_loops.run(body())
