"""Every example is listed and runs as its first lines say.

The two that need a web server run in `tests/e2e/test_http_examples.py`, `queue_manager.py` in
`tests/e2e/test_queue_manager.py`, `shop.py` and `hooks.py` in `tests/cli`, those
of Celery in `tests/integrations/celery`.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .pages import LINK, ROOT, broken_links, text_of

EXAMPLES = ROOT / "examples"
ELSEWHERE = {
    *("shop.py", "hooks.py", "http_service/service.py", "image_bot/bot.py"),
    *("celery_images/images.py", "celery_plans/plans.py", "queue_manager/queue_manager.py"),
}
PROGRAMS = [path.relative_to(EXAMPLES).as_posix() for path in sorted(EXAMPLES.rglob("*.py"))]
PRINTING = [name for name in PROGRAMS if name not in ELSEWHERE and not name.startswith("test_")]


def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an empty directory; no setting of this machine reaches it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FAIRLANE_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, *command], cwd=directory, env=environ, capture_output=True, text=True, timeout=100, check=False
    )


def expected_output(source: str) -> str:
    """The indented block at the end of the docstring."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return textwrap.dedent(docstring.rpartition("\n\n")[2]).strip() + "\n"


@pytest.mark.parametrize("name", PRINTING)
def test_an_example_prints_what_its_first_lines_say(name: str, tmp_path: Path) -> None:
    source = text_of(EXAMPLES / name)
    assert f"\npython examples/{name}\n" in source
    done = run(tmp_path, str(EXAMPLES / name))
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected_output(source)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("test_")])
def test_an_example_of_tests_passes(name: str, tmp_path: Path) -> None:
    command = ("-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider")
    done = run(tmp_path, *command, str(EXAMPLES / name))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_example_is_listed_and_every_link_works() -> None:
    page = EXAMPLES / "README.md"
    assert sorted(link for link in LINK.findall(text_of(page)) if link.endswith(".py")) == PROGRAMS
    assert list(broken_links(page)) == []
