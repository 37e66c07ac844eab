"""The demo: it runs, prints measured numbers, and leaves nothing behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.interrupts import interruptible

DEMO = [sys.executable, "-m", "fairlane", "demo"]


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary files are the demo's alone."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


@contextlib.contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A demo that has ended at the end of the block, also when the test fails in it."""
    with subprocess.Popen([*DEMO, *arguments], stdout=subprocess.PIPE, text=True, **options) as demo:
        try:
            yield demo
        finally:
            if demo.poll() is None:
                demo.kill()


def _workers_of(directory: str) -> list[int]:
    """Processes that were started for a demo in this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"FAIRLANE_URL=sqlite:///{directory}".encode() in environ:
                found.append(int(entry.name))
    return found


def _nothing_is_left(directory: str) -> bool:
    return not _workers_of(directory) and not list(Path(directory).glob("fairlane-demo-*"))


def test_one_round_covers_the_whole_story(place: dict[str, str]) -> None:
    done = subprocess.run([*DEMO, "--once"], capture_output=True, text=True, env=place, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    story = done.stdout
    for part in ("Ann", "300 pictures", "Bob", "urgent", "ahead of you in flux", "kill -9", "run again"):
        assert part in story
    last = re.search(r"(\d+) jobs sent, (\d+) done, (\d+) failed, (\d+) lost", story)
    assert last is not None
    sent, ended, failed, lost = map(int, last.groups())
    assert (sent - ended, failed, lost) == (0, 0, 0)
    assert "every number agrees with a recount" in story
    assert _nothing_is_left(place["TMPDIR"])


def test_it_ends_after_the_given_seconds(place: dict[str, str]) -> None:
    done = subprocess.run([*DEMO, "--seconds", "3"], capture_output=True, text=True, env=place, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Ann" in done.stdout
    assert _nothing_is_left(place["TMPDIR"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_clears_everything_away_when_it_is_ended(place: dict[str, str], number: int) -> None:
    with interruptible(), started(stderr=subprocess.PIPE, env=place) as demo:
        assert demo.stdout is not None
        assert "Starting" in demo.stdout.readline()
        assert "Ann" in demo.stdout.readline()
        demo.send_signal(number)
        _, error = demo.communicate(timeout=60)
        assert (demo.returncode, error) == (0, "")
    assert _nothing_is_left(place["TMPDIR"])


def test_the_dashboard_shows_the_story(place: dict[str, str]) -> None:
    with interruptible(), started("--dashboard", "--port", "0", stderr=subprocess.PIPE, env=place) as demo:
        assert demo.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", demo.stdout.readline())
        assert found is not None
        # It listens already; the request waits until the service has started.
        assert "Fairlane" in httpx.get(found[0], timeout=60).text
        while "Bob" not in demo.stdout.readline():
            assert demo.poll() is None
        story = httpx.get(f"{found[0]}api/v1/story", timeout=60).json()
        assert any("Bob sends one picture" in sentence["text"] for sentence in story["sentences"])
        queues = httpx.get(f"{found[0]}api/v1/queues", timeout=60).json()["queues"]
        assert {queue["name"] for queue in queues} >= {"pictures", "models", "chats", "payments"}
        demo.send_signal(signal.SIGTERM)
        _, error = demo.communicate(timeout=60)
        assert (demo.returncode, error) == (0, "")
    assert _nothing_is_left(place["TMPDIR"])


def test_its_workers_end_even_when_it_is_killed(place: dict[str, str]) -> None:
    with started(env=place) as demo:
        assert demo.stdout is not None
        while "Bob" not in demo.stdout.readline():
            assert demo.poll() is None
        assert _workers_of(place["TMPDIR"])
        demo.kill()
        demo.communicate(timeout=60)
    until = time.monotonic() + 60
    while _workers_of(place["TMPDIR"]):
        assert time.monotonic() < until, "workers were left behind"
        time.sleep(0.1)


def test_a_terminal_sees_a_live_screen(place: dict[str, str]) -> None:
    import pty

    leader, follower = pty.openpty()
    environ = {**place, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    demo = subprocess.Popen(DEMO, stdin=follower, stdout=follower, stderr=follower, env=environ, close_fds=True)
    os.close(follower)
    shown, stopped = b"", False
    try:
        while chunk := os.read(leader, 65_536):
            shown += chunk
            # However slow the machine is: the screen is complete when the last of the workers is on it.
            if b"default/2" in shown and not stopped:
                demo.send_signal(signal.SIGTERM)
                stopped = True
    except OSError:
        # Linux reports the end of a terminal as an error.
        pass
    finally:
        os.close(leader)
        if not stopped:
            demo.kill()
    assert demo.wait(timeout=60) == 0
    text = shown.decode()
    assert "fairlane demo" in text
    assert "default/2" in text
    assert _nothing_is_left(place["TMPDIR"])
