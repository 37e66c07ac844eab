"""Runs a command of Node in this folder: ``python dashboard/node.py npm run build``.

Node and npm come from a wheel of the environment that runs this file, so that every build has the same version. The
packages are installed first, from the lock file, if they are missing or old. Several processes may call it at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "package-lock.json"
STAMP = HERE / "node_modules" / ".installed"


def environ() -> dict[str, str]:
    """The environment in which Node's commands are found beside this interpreter."""
    folder = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}


def install() -> None:
    """Install the packages of the lock file."""
    with LOCK.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        wanted = hashlib.sha256(file.read()).hexdigest()
        if STAMP.exists() and STAMP.read_text() == wanted:
            return
        command = ["npm", "ci", "--silent", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=HERE, env=environ(), stdout=sys.stderr, check=True)
        STAMP.write_text(wanted)


def main() -> int:
    """Install, then run the command of the arguments."""
    install()
    if len(sys.argv) < 2:
        return 0
    return subprocess.run(sys.argv[1:], cwd=HERE, env=environ(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
