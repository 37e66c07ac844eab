"""RabbitMQ servers for tests, where the server is installed: started when the first test asks, gone with its process.

Node, distribution and port mapper listen on 127.0.0.1 alone, each on a port of its own, so that nothing of the system's
own RabbitMQ is touched.
"""

from __future__ import annotations

import atexit
import secrets
import shutil
import socket
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from .guarded import Guarded, sweep
from .installation import Account
from .postgresql import free_port, quick_place

PREFIX = "fairlane-rabbitmq-"
DEBIAN = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The program itself. The one on the path of Debian changes to the account of the system's server."""
PATIENCE = 90.0


class NoServer(Exception):
    """There is no RabbitMQ server to test with, or it did not start."""


def program() -> Path | None:
    """The program of the server, where it is installed."""
    if shutil.which("epmd") is None:
        return None
    if DEBIAN.exists():
        return DEBIAN
    found = shutil.which("rabbitmq-server")
    return None if found is None else Path(found)


class RabbitMQServer:
    """A running server without messages."""

    def __init__(self) -> None:
        found = program()
        if found is None:
            raise NoServer("rabbitmq-server is not installed")
        place = quick_place()
        sweep(list(place.glob(f"{PREFIX}*")))
        self.port = free_port()
        mapper, distribution = free_port(), free_port()
        with ExitStack() as stack:
            names, node = (Path(tempfile.mkdtemp(prefix=PREFIX, dir=place)) for _ in range(2))
            epmd = Guarded(names, Account(), ["true"])
            stack.callback(epmd.close)
            # Otherwise the node starts one that outlives it and listens on every address.
            epmd.start(["epmd", "-address", "127.0.0.1", "-port", str(mapper)])
            self._node = Guarded(node, Account(), ["true"])
            stack.callback(self._node.close)
            (node / "plugins").write_text("[].\n")
            environment = {
                "HOME": node,
                "ERL_EPMD_ADDRESS": "127.0.0.1",
                "ERL_EPMD_PORT": mapper,
                "RABBITMQ_NODENAME": f"test{secrets.token_hex(4)}@localhost",
                "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
                "RABBITMQ_NODE_PORT": self.port,
                "RABBITMQ_DIST_PORT": distribution,
                "RABBITMQ_MNESIA_BASE": node / "mnesia",
                "RABBITMQ_LOG_BASE": node / "logs",
                "RABBITMQ_LOGS": "-",
                "RABBITMQ_ENABLED_PLUGINS_FILE": node / "plugins",
                "RABBITMQ_CONFIG_FILE": node / "none",
                "RABBITMQ_CONF_ENV_FILE": node / "none",
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1 +sbwt none",
                # The script becomes the server, instead of starting it as a child.
                "RUNNING_UNDER_SYSTEMD": "1",
            }
            self._node.start(["env", *(f"{name}={value}" for name, value in environment.items()), str(found)])
            self._wait(node / "log")
            self._stack = stack.pop_all()

    @property
    def url(self) -> str:
        """How it is reached."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def close(self) -> None:
        """End it and remove everything it had."""
        self._stack.close()

    def _wait(self, log: Path) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                    probe.sendall(b"AMQP\x00\x00\x09\x01")
                    if probe.recv(1):
                        return
            except OSError:
                pass
            if self._node.ended(within=0.1) is not None or time.monotonic() > end:
                raise NoServer(f"the server has not started:\n{log.read_text(errors='replace')[-2000:]}")


@cache
def server() -> RabbitMQServer:
    """The server that this process shares."""
    started = RabbitMQServer()
    atexit.register(started.close)
    return started
