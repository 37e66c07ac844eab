"""The group of all commands. A command's module is imported when the command is named or the help lists it; none of
them imports a store or the worker before it runs.
"""

from __future__ import annotations

from importlib import import_module

import click

from .ending import own_process

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
    "schedules": "catalog",
    "tasks": "catalog",
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
    "bench": "bench",
    "completion": "maintenance",
}
"""Every command with the module that holds it, in the order of the help."""


class Commands(click.Group):
    """Imports the module of a command when somebody asks for it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        found = getattr(import_module(f".{module}", __package__), f"{cmd_name}_command")
        assert isinstance(found, click.Command)
        return found


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`fairlane demo` shows what it is about. Every command explains itself by --help.",
)
@click.version_option(package_name="fairlane", message="fairlane %(version)s")
def fairlane() -> None:
    """Fairlane: a task queue for Python in which nobody blocks anybody else."""


def main() -> None:
    """What the installed script calls."""
    own_process()
    fairlane(prog_name="fairlane")
