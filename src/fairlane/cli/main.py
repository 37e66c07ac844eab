"""The ``fairlane`` command group.

The module of a command is imported when the command is used or listed in the help. No module imports a store or the
worker before its command runs.
"""

from __future__ import annotations

from importlib import import_module

import click

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

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        found = getattr(import_module(f".{module}", __package__), f"{cmd_name}_command")
        assert isinstance(found, click.Command)
        return found


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
