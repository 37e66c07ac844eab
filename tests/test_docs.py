"""The pages tell the truth: their examples run and print what stands below them, their commands exist with these
options, and their links lead somewhere. `test_reference.py` compares the reference with the code.
"""

import ast
import asyncio
import contextlib
import importlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import click
import pytest

from fairlane.cli.main import fairlane

from .pages import DOCS, LINK, PAGES, ROOT, broken_links, commands_of, examples_of, name_of, text_of
from .servers.postgresql import server
from .servers.stores import COMPOSED, KINDS

SESSIONS = [DOCS / "tutorial.md", DOCS / "howto" / "django.md"]
"""The pages that are a session in a shell: their files are saved, and their commands run, one after the other."""
SESSION_SECONDS = 250
IMPATIENT = {"LEASE": 4, "HEARTBEAT": 1, "CAUTION": 2, "LEADER_LEASE": 4, "LEADER_RENEW": 1, "STAND": 1}
"""Leases that are shorter than the defaults, so that dead processes are detected soon."""
ON_POSTGRESQL = {DOCS / "howto" / "commit-with-your-data.md"}
"""Pages whose examples find a database at FAIRLANE_URL."""
WITHOUT_EXAMPLES = {
    *("CONTRIBUTING.md", "docs/README.md", "docs/architecture.md", "docs/benchmarks.md", "docs/cli.md"),
    *("docs/coming-from.md", "docs/decisions.md", "docs/glossary.md", "docs/names-of-the-source-systems.md"),
    *("docs/states.md",),
}


def run(text: str, name: str) -> None:
    """Run the examples of a page one after the other, as one module in which `await` may stand anywhere.

    An example that is a file is saved in the current directory and imported; if it is one of tests, these run too.
    """
    module: dict[str, object] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for example in examples_of(text):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                if example.file is not None:
                    file = Path(example.file)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(example.source)
                    importlib.invalidate_caches()
                    importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
                    if example.file.startswith("test_"):
                        run_tests(example.file)
                else:
                    # Empty lines before it, so that a traceback names the line of the page.
                    source = "\n" * example.line + example.source
                    code = compile(source, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
                    answer = FunctionType(code, module)()
                    if inspect.iscoroutine(answer):
                        runner.run(answer)
            if example.printed is not None:
                assert output.getvalue() == example.printed, f"{name}, line {example.line}"


def run_tests(file: str) -> None:
    """In a process of its own, as a reader would; nothing of this run's settings holds there."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-o", "anyio_mode=auto", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory to work in, from which modules are imported; no setting of this machine reaches it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in os.environ if name.startswith("FAIRLANE_")]:
        monkeypatch.delenv(name)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def play(text: str, directory: Path) -> None:
    """Save the files of a page, and run its shell blocks as one session; compare what they print."""
    for example in examples_of(text):
        assert example.file is not None, f"line {example.line}: name the file that the block is"
        (directory / example.file).parent.mkdir(parents=True, exist_ok=True)
        (directory / example.file).write_text(example.source)
    blocks = examples_of(text, "sh")
    # Each block writes into a file of its own, so that none can be taken for another.
    script = "\n".join(f"{{\n{block.source}}} >{number}.out" for number, block in enumerate(blocks))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    session = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env={**os.environ, "PATH": path, **{f"FAIRLANE_{name}": str(seconds) for name, seconds in IMPATIENT.items()}},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, told = session.communicate(timeout=SESSION_SECONDS)
    finally:
        # What it left in the background belongs to its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session.pid, signal.SIGKILL)
    assert session.returncode == 0, told
    for number, block in enumerate(blocks):
        if block.printed is not None:
            assert (directory / f"{number}.out").read_text() == block.printed, f"line {block.line}"


def check_command(words: list[str]) -> None:
    """Parse a command line as it would be parsed, and run nothing."""
    with click.Context(fairlane, info_name="fairlane") as parent:
        if words and not words[0].startswith("-"):
            name, command, rest = fairlane.resolve_command(parent, words)
            if isinstance(command, click.Group):
                name, command, rest = command.resolve_command(parent, rest or ["--help"])
            assert command is not None
            with contextlib.suppress(click.exceptions.Exit), command.make_context(name, rest, parent=parent):
                pass
        else:
            assert set(words) <= {"--help", "-h", "--version"}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in SESSIONS], ids=name_of)
def test_every_example_runs_and_prints_what_stands_below_it(
    page: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in ON_POSTGRESQL:
        monkeypatch.setenv("FAIRLANE_URL", server().fresh_database())
    run(text_of(page), name_of(page))


@pytest.mark.parametrize("page", SESSIONS, ids=name_of)
def test_a_session_works_from_the_first_line_to_the_last(page: Path, desk: Path) -> None:
    play(text_of(page), desk)


def test_the_pages_have_examples() -> None:
    assert {name_of(page) for page in PAGES if not examples_of(text_of(page))} == WITHOUT_EXAMPLES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_on_a_page_exists_and_takes_these_options(
    page: Path, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "jobs.jsonl").touch()
    for words in commands_of(text_of(page)):
        try:
            check_command(words)
        except click.ClickException as exc:
            pytest.fail(f"fairlane {' '.join(words)}: {exc.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "README.md"
    linked = {(DOCS / target).resolve() for target in LINK.findall(text_of(index))}
    assert [name_of(page) for page in sorted(DOCS.rglob("*.md")) if page not in {*linked, index}] == []


def test_every_make_target_on_a_page_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:^    |`)make ([a-z]+)", text_of(page), re.MULTILINE)}
    assert named - targets == set()
    assert {"run", "test", "check"} <= named


def test_the_inner_loop_runs_on_sqlite_alone() -> None:
    quick = text_of(ROOT / "Makefile").partition("\nquick:")[2].partition("\n\n")[0]
    left_out = set(re.findall(r"\bnot (\w+)", quick))
    assert left_out == {*KINDS, COMPOSED} - {"sqlite"}


def test_a_wrong_example_is_found() -> None:
    run("```python\nasync def one(): return 1\n```\n\n```python\nprint(await one())\n```\n\n```text\n1\n```\n", "page")
    with pytest.raises(AssertionError, match="page, line 1"):
        run("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page")
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", "page")
    with pytest.raises(AssertionError, match="every example runs"):
        run("```python no-run\n1 / 0\n```\n", "page")


def test_an_example_that_is_a_file_can_be_imported(desk: Path) -> None:
    run("```python\n# tea.py\nC = 2\n```\n\n```python\nimport tea\nprint(tea.C)\n```\n\n```text\n2\n```\n", "page")


def test_an_example_that_is_a_file_of_tests_is_run(desk: Path) -> None:
    page = "```python\n# test_tea.py\nasync def test_tea(): assert {}\n```\n"
    run(page.format(1), "page")
    del sys.modules["test_tea"]
    with pytest.raises(AssertionError, match="1 failed"):
        run(page.format(0), "page")


def test_a_wrong_session_is_found(desk: Path) -> None:
    said = "```python\n# hi.py\nprint(1)\n```\n\n```sh\npython hi.py\n```\n\n```text\n{}\n```\n"
    play(said.format(1), desk)
    with pytest.raises(AssertionError, match="line 6"):
        play(said.format(2), desk)
    with pytest.raises(AssertionError, match="not-a-command"):
        play("```sh\nnot-a-command\n```\n", desk)


def test_a_wrong_command_is_found() -> None:
    page = "```sh\nFAIRLANE_GRACE=1 fairlane worker -A shop --sloths 3 2>log & # twice\nls\n```\n`fairlane jam -q x`\n"
    assert commands_of(page) == [["worker", "-A", "shop", "--sloths", "3"], ["jam", "-q", "x"]]
    for words in commands_of(page):
        with pytest.raises(click.UsageError):
            check_command(words)
    check_command(["worker", "-A", "shop", "--slots", "3"])


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One page\n[a](page.md) [b](#one-page) [c](other.md) [d](page.md#two) [e](https://example.org/x)\n"
    )
    assert list(broken_links(page)) == ["other.md", "page.md#two"]
