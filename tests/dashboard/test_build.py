"""The built files are those of the sources, small, and complete."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

from fairlane.http.pages import FOLDER, page_files

from .browsers import ROOT, SOURCES, node, node_modules

BUILT = ROOT / "src" / "fairlane" / "http" / FOLDER
FILES = ("index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.js")
MOST_BYTES = 150_000


def test_the_committed_build_is_that_of_the_sources() -> None:
    paths = [*FILES, *(path.relative_to(SOURCES).as_posix() for path in SOURCES.glob("src/**/*") if path.is_file())]
    now = {path: hashlib.sha256((SOURCES / path).read_bytes()).hexdigest() for path in paths}
    lines = (BUILT / "sources.sha256").read_text().splitlines()
    recorded = {path: digest for digest, path in (line.split("  ") for line in lines)}
    changed = sorted(path for path in now.keys() | recorded.keys() if now.get(path) != recorded.get(path))
    assert not changed, f"run `make dashboard`: {', '.join(changed)} changed since the last build"


def test_the_bundle_is_small_and_all_of_it_is_served() -> None:
    files = page_files()
    assert sum(len(gzip.compress(file.body)) for file in files.values()) <= MOST_BYTES
    page = files["index.html"].body.decode()
    named = set(re.findall(r'(?:src|href)="\./([^"]+)"', page))
    assert named
    assert named <= files.keys()


def test_the_lock_names_no_host() -> None:
    assert '"resolved"' not in (SOURCES / "package-lock.json").read_text()


def test_building_again_makes_the_same_files(tmp_path: Path) -> None:
    node_modules()
    node("npx", "vite", "build", "--outDir", str(tmp_path), "--emptyOutDir")
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    committed = {path.relative_to(BUILT): path.read_bytes() for path in BUILT.rglob("*") if path.is_file()}
    assert made == {path: content for path, content in committed.items() if path.name != "sources.sha256"}
