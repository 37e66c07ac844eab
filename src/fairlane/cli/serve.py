"""The command ``serve``: the HTTP service of an application, optionally with workers in the same process."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

import click

from .. import event_loops
from ..errors import InvalidInput
from ..runtime.logs import configure
from .command import Command, log_options, run, store_options
from .context import CommandContext, StoreAccess

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from ..http.settings import HttpSettings

OPTIONS = {"hosts": "--allowed-host", "origins": "--origin"}
"""The option of each setting."""
SHUTDOWN_MARGIN = 5
"""Seconds after the workers' grace period at which open connections are closed."""


@click.command("serve", cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8_000, show_default=True, help="The port; 0 picks a free one."
)
@click.option(
    "--workers-embedded",
    type=click.IntRange(0, 64),
    default=0,
    show_default=True,
    help="Also run this many workers in this process.",
)
@click.option("--allowed-host", multiple=True, metavar="NAME", help="An accepted Host header; repeatable.")
@click.option(
    "--origin", multiple=True, metavar="ORIGIN", help="A web origin whose pages may call the API; repeatable."
)
@click.option(
    "--celery", "celery_name", metavar="MODULE:APP", help="A Celery application whose balanced queues are shown too."
)
@click.option("--insecure", is_flag=True, help="Require no token from any address.")
@log_options
@store_options
def serve_command(
    host: str,
    port: int,
    workers_embedded: int,
    allowed_host: tuple[str, ...],
    origin: tuple[str, ...],
    celery_name: str | None,
    insecure: bool,
    app_name: str | None,
    url: str | None,
    log_level: str,
    log_format: str | None,
) -> None:
    """Serve the HTTP API and the dashboard, by default only to this machine. Any other --host requires a token."""
    context = CommandContext(app_name, url, StoreAccess.CREATE)
    context.require_application()
    if workers_embedded:
        context.require_tasks()
    configure(log_level, log_format)
    try:
        import uvicorn

        from ..http.settings import HttpSettings
    except ModuleNotFoundError as exc:
        raise click.ClickException(f"serve requires {exc.name}: pip install 'fairlane[http]'") from None
    local = is_local(host)
    try:
        settings = HttpSettings(
            access="open" if insecure else "auto" if local else "tokens",
            hosts=tuple(name.lower() for name in allowed_host) or None,
            origins=tuple(each.lower() for each in origin),
        )
    except InvalidInput as exc:
        raise InvalidInput(OPTIONS.get(exc.field, exc.field), exc.problem) from None
    web = _web(context, settings, workers_embedded, celery_name)
    if not local and not insecure:
        run(_require_token(context, host, web))
    config = uvicorn.Config(
        web,
        host=host,
        port=port,
        log_config=None,
        log_level=log_level.lower(),
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(context.app.settings.grace) + SHUTDOWN_MARGIN,
        h11_max_incomplete_event_size=settings.header_bytes * 2,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again after a graceful shutdown; that is not an error.
        signal.signal(number, _end)
    event_loops.run(_serve(uvicorn.Server(config), host, port))


async def _serve(server: uvicorn.Server, host: str, port: int) -> None:
    try:
        # uvicorn logs several lines for a busy port and exits with 3, so the addresses are bound once before.
        free = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    except OSError as exc:
        reason = os.strerror(exc.errno) if exc.errno is not None and exc.errno > 0 else exc.strerror
        hint = " (choose another one with --port)" if exc.errno == errno.EADDRINUSE else ""
        raise click.ClickException(f"cannot listen on {host}, port {port}: {reason}{hint}") from None
    free.close()
    await free.wait_closed()
    await server.serve()


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def is_local(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _web(context: CommandContext, settings: HttpSettings, workers: int, celery_name: str | None) -> FastAPI:
    extra = []
    if celery_name is not None:
        from ..http.routes.celery import load_operations
        from .celery import find_balancer

        extra.append(load_operations(find_balancer(celery_name).loads))
    if workers:
        from ..http.instance import serve_app

        return serve_app(context.app, settings=settings, workers=workers, extra=extra)
    from ..http.application import create_app

    return create_app(context.app, settings=settings, extra=extra)


async def _require_token(context: CommandContext, host: str, web: FastAPI) -> None:
    """Raise InvalidInput if the service would be reachable from elsewhere and the store has no tokens."""
    from ..http.application import service_of

    try:
        if not await service_of(web).access.has_tokens():
            raise InvalidInput(
                "--host",
                f"{host} is reachable from other machines: make a token with `fairlane tokens new`, or give --insecure",
            )
    finally:
        await context.close()
