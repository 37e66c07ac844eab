"""Commands that look after the store and the shell: ``migrate``, ``doctor``, ``completion``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec
from rich.text import Text

from . import display
from .command import Command, json_option, run, store_options
from .context import Target, Use
from .display import plain

if TYPE_CHECKING:
    from ..store.diagnosis import Finding


@click.command("migrate", cls=Command)
@store_options
@json_option
def migrate_command(app_name: str | None, url: str | None, as_json: bool) -> None:
    """Bring the store's schema up to date. Doing it twice, even at once, is harmless."""

    async def work(target: Target) -> None:
        async with target.client() as client:
            version = await client.migrate()
        if as_json:
            display.show_json({"store": target.shown_url, "version": version})
        else:
            display.show(plain(f"{target.shown_url} has schema version {version}"))

    run(work(Target(app_name, url, Use.MAKE)))


@click.command("doctor", cls=Command)
@click.option("--recount", is_flag=True, help="Also compute every number anew from the jobs, and correct what differs.")
@store_options
@json_option
def doctor_command(recount: bool, app_name: str | None, url: str | None, as_json: bool) -> None:
    """Look for what is wrong, and say what to do about it. Exits with 1 when there is an error."""
    from ..doctor import diagnose
    from ..store.diagnosis import Level

    async def work(target: Target) -> list[Finding]:
        async with target.client():
            return await diagnose(target.connection, recount=recount)

    target = Target(app_name, url)
    findings = run(work(target))
    if as_json:
        display.show_json({"store": target.shown_url, "findings": [msgspec.to_builtins(f) for f in findings]})
    else:
        display.show(plain(target.shown_url, "dim"))
        rows = []
        for finding in findings:
            what = plain(finding.what)
            if finding.advice:
                what += Text("\n→ ", style="dim") + plain(finding.advice, "dim")
            rows.append((display.word(finding.level.value), plain(finding.topic), what))
        display.show(display.table(("", "", ""), rows, head=False))
    if any(finding.level is Level.ERROR for finding in findings):
        sys.exit(1)


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the script that completes commands in your SHELL.

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
