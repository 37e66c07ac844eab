"""The command ``celery bindings``: which plan of a Celery application is on which worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
from rich.text import Text

from .. import documents
from ..errors import InvalidInput
from . import display
from .celery_app import celery_option, find_celery_app
from .command import Command, json_option
from .display import plain

if TYPE_CHECKING:
    from ..integrations.celery.sticky import StickyRouter


@click.command("bindings", cls=Command)
@celery_option
@click.option("--key", help="All bindings of this key, the oldest first, also those that are closed.")
@json_option
def celery_bindings_command(app_name: str | None, key: str | None, as_json: bool) -> None:
    """Show which key is bound to which worker of the application's StickyRouter."""
    router = find_router(app_name)
    bindings = router.bindings() if key is None else router.history(key)
    if as_json:
        display.show_json({"org": router.org, "bindings": [documents.binding_record(each) for each in bindings]})
        return
    now = time.time()
    rows = [
        (
            plain(binding.key),
            plain(router.one_worker(binding.index), "bold"),
            display.state_text(binding.state.value),
            Text(display.ago(binding.opened_at, now)),
            Text(display.ago(binding.used_at, now)),
            Text(display.ago(binding.closed_at, now)),
        )
        for binding in bindings
    ]
    head = ("key", "worker", "state", "opened", "used", "closed")
    display.show(display.table(head, rows) if rows else display.empty("no bindings", f"the pool {router.org}"))


def find_router(app_name: str | None) -> StickyRouter:
    """Import a Celery application and return its router."""
    app = find_celery_app(app_name)
    from ..integrations.celery.applications import fairs

    router = None if app not in fairs else fairs[app].router
    if router is None:
        raise InvalidInput("--app", f"{app_name} has no StickyRouter")
    return router
