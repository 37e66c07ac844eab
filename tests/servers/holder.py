"""A process that owns a test server, for tests of what remains of the server when the process ends.

It prints what it owns once the server runs, and then executes the commands ``freeze`` and ``kill`` from its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from . import postgresql, template
from .guard import children_of


def main(folders: str, cache: str) -> None:
    """Start a server in `folders` from a template in `cache`, and hold it until the input ends."""
    postgresql.DISK = postgresql.MEMORY = Path(folders)
    template.CACHE = Path(cache)
    server = postgresql.own_server(durable=False)
    assert server.pid is not None
    guards = list(children_of(os.getpid()))
    processes = [server.pid, *children_of(server.pid), *guards]
    # The shared memory by which the server knows that it runs already.
    _, memory = (server.data / "postmaster.pid").read_text().splitlines()[6].split()
    said = {
        "folder": str(server.folder),
        "port": server.port,
        "guard": guards,
        "processes": processes,
        "memory": memory,
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            if line.strip() == "freeze":
                stack.enter_context(server.frozen())
            else:
                server.kill()
            sys.stdout.write("done\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
