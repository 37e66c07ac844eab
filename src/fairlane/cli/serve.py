"""The command ``serve``: the HTTP service of an application, with workers in the same process if wanted."""

from __future__ import annotations

import ipaddress
import signal
from types import FrameType
from typing import TYPE_CHECKING

import click

from .. import event_loops
from ..errors import InvalidInput
from ..runtime.logs import configure
from .command import Command, log_options, run, store_options
from .context import Target, Use

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..http.settings import HttpSettings

GRACE_LEFT = 5
"""Seconds beyond the workers' grace after which connections that are still open are cut."""


@click.command("serve", cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8_000, show_default=True, help="0: any free one.")
@click.option(
    "--workers-embedded",
    type=click.IntRange(0, 64),
    default=0,
    show_default=True,
    help="Workers inside this process, which run the jobs too.",
)
@click.option("--allowed-host", multiple=True, metavar="NAME", help="A name by which it may be addressed; repeatable.")
@click.option("--origin", multiple=True, metavar="ORIGIN", help="A web origin whose pages may call; repeatable.")
@click.option("--insecure", is_flag=True, help="Require no token, wherever a request comes from.")
@log_options
@store_options
def serve_command(
    host: str,
    port: int,
    workers_embedded: int,
    allowed_host: tuple[str, ...],
    origin: tuple[str, ...],
    insecure: bool,
    app_name: str | None,
    url: str | None,
    log_level: str,
    log_format: str,
) -> None:
    """Serve the HTTP API. From this machine only, unless --host says otherwise, which needs a token."""
    target = Target(app_name, url, Use.MAKE)
    target.demand_code()
    configure(log_level, log_format)
    try:
        import uvicorn

        from ..http.settings import HttpSettings
    except ModuleNotFoundError as exc:
        raise click.ClickException(f"serve needs {exc.name}: pip install 'fairlane[http]'") from None
    local = is_local(host)
    settings = HttpSettings(
        access="open" if insecure else "auto" if local else "tokens",
        hosts=tuple(name.lower() for name in allowed_host) or None,
        origins=tuple(each.lower() for each in origin),
    )
    web = _web(target, settings, workers_embedded)
    if not local and not insecure:
        run(_demand_token(target, host, web))
    config = uvicorn.Config(
        web,
        host=host,
        port=port,
        log_config=None,
        log_level=log_level.lower(),
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(target.app.settings.grace) + GRACE_LEFT,
        h11_max_incomplete_event_size=settings.header_bytes * 2,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # The server raises the signal again when it has stopped in good order, which is no failure.
        signal.signal(number, _end)
    event_loops.run(uvicorn.Server(config).serve())


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def is_local(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _web(target: Target, settings: HttpSettings, workers: int) -> FastAPI:
    if workers:
        from ..http.instance import serve_app

        return serve_app(target.app, settings=settings, workers=workers)
    from ..http.application import create_app

    return create_app(target.app, settings=settings)


async def _demand_token(target: Target, host: str, web: FastAPI) -> None:
    """Refuse to be reached from elsewhere while nobody could be told from anybody."""
    from ..http.application import service_of

    try:
        if not await service_of(web).access.has_tokens():
            raise InvalidInput(
                "--host",
                f"{host} is reached from other machines: make a token with `fairlane tokens` first, or give --insecure",
            )
    finally:
        await target.close()
