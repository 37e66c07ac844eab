"""The command group ``celery``: loads, reset and doctor of a load balancer, and bindings of a sticky router."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click
import msgspec

from ..errors import FairlaneError, StoreUnavailable
from . import display
from .celery_app import celery_option, find_celery_app
from .celery_bindings import celery_bindings_command
from .command import Command, json_option
from .display import plain

if TYPE_CHECKING:
    from ..integrations.celery.balancer.balancer import LoadBalancer
    from ..integrations.celery.balancer.leases import Load


class BalancerCommand(Command):
    """A command of the load balancer, whose tasks are messages: what shows jobs does not help with it."""

    next_steps: Mapping[type[FairlaneError], str] = {StoreUnavailable: "try again, or run `fairlane celery doctor`"}


@click.group("celery")
def celery_command() -> None:
    """A Celery application: loads, reset and doctor of its load balancer, bindings of its sticky router."""


celery_command.add_command(celery_bindings_command)


@celery_command.command("loads", cls=BalancerCommand)
@celery_option
@json_option
def loads_command(app_name: str | None, as_json: bool) -> None:
    """Show how many tasks wait and run in each balanced queue."""
    balancer = find_balancer(app_name)
    _show_loads(balancer.loads(), as_json)


@celery_command.command("reset", cls=BalancerCommand)
@click.argument("queue", required=False)
@celery_option
@json_option
def reset_command(queue: str | None, app_name: str | None, as_json: bool) -> None:
    """Recount all queues or one from the broker and the live workers. It is safe while tasks run."""
    balancer = find_balancer(app_name)
    _show_loads(balancer.reset(queue), as_json)


@celery_command.command("doctor", cls=BalancerCommand)
@celery_option
@json_option
def doctor_command(app_name: str | None, as_json: bool) -> None:
    """Look for problems of the load balancer and suggest a fix for each. The exit code is 1 if there is an error."""
    from ..store.diagnosis import Level

    findings = find_balancer(app_name).diagnose()
    if as_json:
        display.show_json({"findings": [msgspec.to_builtins(finding) for finding in findings]})
    else:
        display.show(display.findings(findings))
    if any(finding.level is Level.ERROR for finding in findings):
        sys.exit(1)


def find_balancer(app_name: str | None) -> LoadBalancer:
    """Import a Celery application and return its balancer."""
    app = find_celery_app(app_name)
    from ..integrations.celery.balancer.balancer import balancer_of

    return balancer_of(app)


def _show_loads(loads: dict[str, Load], as_json: bool) -> None:
    if as_json:
        display.show_json({"queues": {name: msgspec.to_builtins(load) for name, load in loads.items()}})
        return
    rows = [
        (plain(name, "bold"), display.number(load.pending, "yellow"), display.number(load.running, "bright_blue"))
        for name, load in loads.items()
    ]
    display.show(display.table(("queue", "pending", "running"), rows))
