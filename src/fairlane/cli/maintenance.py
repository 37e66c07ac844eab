"""The commands ``migrate``, ``doctor`` and ``completion``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from . import display
from .command import Command, json_option, run, store_options
from .context import CommandContext, StoreAccess
from .display import plain

if TYPE_CHECKING:
    from ..store.diagnosis import Finding


@click.command("migrate", cls=Command)
@store_options
@json_option
def migrate_command(app_name: str | None, url: str | None, as_json: bool) -> None:
    """Upgrade the store's schema. It is safe to repeat, and to run from several machines at once."""

    async def work(context: CommandContext) -> None:
        async with context.client() as client:
            version = await client.migrate()
        if as_json:
            display.show_json({"store": context.shown_url, "version": version})
        else:
            display.show(plain(f"{context.shown_url} has schema version {version}"))

    run(work(CommandContext(app_name, url, StoreAccess.CREATE)))


@click.command("doctor", cls=Command)
@click.option("--recount", is_flag=True, help="Also recompute every count from the jobs and correct differences.")
@store_options
@json_option
def doctor_command(recount: bool, app_name: str | None, url: str | None, as_json: bool) -> None:
    """Look for problems and suggest a fix for each. The exit code is 1 if there is an error."""
    from ..doctor import diagnose
    from ..store.diagnosis import Level

    async def work(context: CommandContext) -> list[Finding]:
        async with context.client():
            return await diagnose(context.connection, recount=recount)

    context = CommandContext(app_name, url)
    findings = run(work(context))
    if as_json:
        display.show_json({"store": context.shown_url, "findings": [msgspec.to_builtins(f) for f in findings]})
    else:
        display.show(plain(context.shown_url, "dim"))
        display.show(display.findings(findings))
    if any(finding.level is Level.ERROR for finding in findings):
        sys.exit(1)


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a script that completes commands in your SHELL.

    \b
    bash:  eval "$(fairlane completion bash)"     in ~/.bashrc
    zsh:   eval "$(fairlane completion zsh)"      in ~/.zshrc
    fish:  fairlane completion fish | source      in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    from .main import fairlane

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(fairlane, {}, "fairlane", "_FAIRLANE_COMPLETE").source())
