"""The ``fairlane`` command group.

The module of a command is imported when the command is used or listed in the help. No module imports a store or the
worker before its command runs.
"""

from __future__ import annotations

import shlex
from difflib import get_close_matches
from importlib import import_module

import click

from ..model import foreign_words
from .process_exit import allow_forced_exit

COMMANDS = {
    "demo": "demo.command",
    "worker": "worker",
    "manager": "manager",
    "serve": "serve",
    "enqueue": "enqueue",
    "status": "jobs",
    "top": "top",
    "jobs": "jobs",
    "job": "jobs",
    "queues": "queues",
    "lanes": "queues",
    "workers": "queues",
    "bindings": "queues",
    "schedules": "tasks",
    "tasks": "tasks",
    "tokens": "tokens",
    "pause": "queues",
    "resume": "queues",
    "limit": "limits",
    "retry": "job_actions",
    "cancel": "job_actions",
    "purge": "job_actions",
    "release": "job_actions",
    "migrate": "maintenance",
    "doctor": "maintenance",
    "celery": "celery",
    "bench": "bench",
    "completion": "maintenance",
}
"""Every command and its module, in the order of the help."""


class Commands(click.Group):
    """Imports the module of a command on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what precedes the command; an option there is misplaced."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            hint = _misplaced(given)
            raise click.UsageError(f"No such option {exc.option_name!r} before the command; {hint}", ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. Names of other task queues, and those that are nearly right, are answered with ours."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            hint = foreign_words.COMMAND.get(name)
            if hint is None and (close := get_close_matches(name, COMMANDS)):
                hint = f"did you mean {close[0]!r}?"
            raise click.UsageError(f"No such command {name!r}" + (f"; {hint}" if hint else ""), ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        found = getattr(import_module(f".{module}", __package__), f"{cmd_name}_command")
        assert isinstance(found, click.Command)
        return found


def _misplaced(args: list[str]) -> str:
    """Where the options of a command belong. A URL is left out, because it may have a password."""
    for n, word in enumerate(args):
        if word in COMMANDS:
            rest = shlex.join("URL" if "://" in each else each for each in args[:n] + args[n + 1 :])
            return f"options follow it: fairlane {word} {rest}"
        if word in foreign_words.COMMAND:
            return foreign_words.COMMAND[word]
    return "options follow it: fairlane COMMAND [OPTIONS]"


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `fairlane demo`. `fairlane COMMAND --help` explains a command.",
)
@click.version_option(package_name="fairlane", message="fairlane %(version)s")
def fairlane() -> None:
    """Fairlane: a task queue for Python in which no tenant blocks another."""


def main() -> None:
    """The entry point of the installed script."""
    allow_forced_exit()
    fairlane(prog_name="fairlane")
