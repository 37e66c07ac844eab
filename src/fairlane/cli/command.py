"""What all commands share: the options that name an application and a store, and how errors are printed.

A Fairlane error is printed as one line on standard error, with a hint at what to do next. The exit code is 2 for
rejected input and 1 for any other error. Only ``--debug`` shows a traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import click

from .. import event_loops
from ..errors import FairlaneError, InvalidInput, NotFound, SchemaMismatch, StoreMissing, StoreUnavailable
from ..model import foreign_words
from ..runtime.logs import FORMATS, LEVELS, escaped

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Store warnings about the server belong in the logs of long-running processes. Short commands stay silent about them;
# `fairlane doctor` reports them.
logging.getLogger("fairlane.store").addHandler(logging.NullHandler())

NEXT_STEPS: dict[type[FairlaneError], str] = {
    NotFound: "list what exists with `fairlane jobs` or `fairlane queues`",
    StoreUnavailable: "no job is lost; try again, or run `fairlane doctor`",
    StoreMissing: "create it with `fairlane migrate`, or name another with --url, -A or FAIRLANE_URL",
    SchemaMismatch: "upgrade an older store with `fairlane migrate`; a newer one needs a newer version of fairlane",
}


class CommandError(click.ClickException):
    """A Fairlane error, printed as one line with a hint."""

    def __init__(self, error: FairlaneError, next_steps: Mapping[type[FairlaneError], str] = NEXT_STEPS) -> None:
        lines = " ".join(str(error).split("\n"))
        hint = next((step for kind, step in next_steps.items() if isinstance(error, kind)), None)
        super().__init__(escaped(lines) + (f" ({hint})" if hint else ""))


class InputError(CommandError):
    """Rejected input."""

    exit_code = 2


class Command(click.Command):
    """A command that prints Fairlane errors as one line, or as a traceback with ``--debug``."""

    next_steps: Mapping[type[FairlaneError], str] = NEXT_STEPS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Options of other task queues are answered with ours."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            hint = foreign_words.COMMAND_OPTION.get(exc.option_name)
            if hint is None:
                raise
            raise click.UsageError(f"No such option {exc.option_name!r}; {hint}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        debug = ctx.params.pop("debug")
        try:
            return super().invoke(ctx)
        except FairlaneError as exc:
            if debug:
                raise
            raise (InputError if isinstance(exc, InvalidInput) else CommandError)(exc, self.next_steps) from exc


class _AppName(click.types.StringParamType):
    """The type of ``-A``. The environment variable separates several names by commas, as ``-Q`` does."""

    envvar_list_splitter = ","


def app_option(function: F) -> F:
    """Add ``-A``, which names the application. Several names arrive in `app_name`, separated by commas."""
    return click.option(
        *("-A", "--app", "app_name"),
        type=_AppName(),
        multiple=True,
        callback=lambda _ctx, _option, names: ",".join(name for name in names if name) or None,
        envvar="FAIRLANE_APP",
        show_envvar=True,
        metavar="MODULE:APP",
        help="The application: module, module:app or path/to/file.py:app. Repeatable; several act as one.",
    )(function)


def url_option(function: F) -> F:
    """Add ``--url``, which names the store. FAIRLANE_URL is read together with the other settings."""
    return click.option(
        "--url",
        metavar="URL",
        help="The store. [default: the application's, FAIRLANE_URL, or sqlite:///fairlane.db]",
    )(function)


def store_options(function: F) -> F:
    """Add ``-A`` and ``--url``. Commands that need no tasks take only the store from the application."""
    return app_option(url_option(function))


def log_options(function: F) -> F:
    """Add ``--log-level`` and ``--log-format``, for long-running commands."""
    level = click.option(
        *("--log-level", "-l"),
        type=click.Choice(LEVELS, case_sensitive=False),
        default="info",
        envvar="FAIRLANE_LOG_LEVEL",
        show_default=True,
        show_envvar=True,
        help="The lowest level to log. info logs a line for every job that ends.",
    )
    format = click.option(
        "--log-format",
        type=click.Choice(FORMATS),
        default=None,
        envvar="FAIRLANE_LOG_FORMAT",
        show_default="text, or the application's if it logs to the console",
        show_envvar=True,
        help="Readable text, or one JSON object per line.",
    )
    return level(format(function))


def json_option(function: F) -> F:
    """Add ``--json``, which arrives as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(function)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine of a command."""
    return event_loops.run(work)
