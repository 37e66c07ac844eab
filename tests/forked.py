"""A program for the tests of forks: prints what it is, or ends as requested."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

from fairlane.model.ids import new_id


def main(order: str = "tell", *rest: str) -> None:
    """Do what the arguments say."""
    if order == "exit":
        sys.exit(int(rest[0]))
    if order == "raise":
        raise ValueError("as asked")
    if order == "sleep":
        time.sleep(60)
    told = {
        "arguments": [order, *rest],
        "environ": dict(os.environ),
        "input": sys.stdin.read(),
        "session": os.getsid(0),
        "pid": os.getpid(),
        "name": __name__,
        "interrupt": getattr(signal.getsignal(signal.SIGINT), "__name__", ""),
        "id": new_id(),
        "random": random.random(),
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
