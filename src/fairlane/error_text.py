"""The one line that names the error of a stored traceback: what summaries, listings and log lines show of it.

The message of an exception may have many lines, and any text in them: the last line of a traceback may be a link to a
manual, or words that an attacker has sent. The line that names the class is the one that follows the frames.
"""

from __future__ import annotations

import re

_HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = f"  + Exception Group {_HEADER}"
_GROUP_MARGIN = "  | "
_CHAINED = frozenset(
    (
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    )
)
_FRAME = re.compile(r'  File ".*", line \d+')
_NAMED = re.compile(r"[^\W\d][\w.<>]*: ")
_CUT = "…"
"""Stands in a stored error for its middle where that was too long."""


def error_summary(text: str | None) -> str | None:
    """The line that begins the last exception of a traceback; of any other text the last non-blank line."""
    lines = (text or "").strip("\r\n").split("\n")
    found = _first_line_of_exception(_last_traceback(lines))
    if found is None:
        # Not a traceback, or too much of it was cut off.
        found = next((line for line in reversed(lines) if line.strip()), "")
    # Other characters that end lines, such as a carriage return, may stand in a message too.
    parts = found.strip().splitlines()
    return parts[0].strip() if parts else None


def _last_traceback(lines: list[str]) -> list[str]:
    """The lines of the last exception of a chain."""
    frames_follow, after = False, ""
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        if line in _CHAINED and not after and number and not lines[number - 1]:
            return lines[number + 2 :]
        if _CUT in line and frames_follow:
            # What was cut off may be the end of one traceback and the beginning of the next.
            return lines[number + 1 :]
        frames_follow = line.startswith(" ") and (frames_follow or _FRAME.match(line) is not None)
        after = line
    return lines


def _first_line_of_exception(lines: list[str]) -> str | None:
    """The first line after the frames; None when it cannot be told."""
    first = lines[0] if lines else ""
    if first == _GROUP_HEADER or first.startswith(_GROUP_MARGIN):
        lines = [line[len(_GROUP_MARGIN) :] if line.startswith(_GROUP_MARGIN) else line for line in lines]
        first = _HEADER if first == _GROUP_HEADER else lines[0]
    if _NAMED.match(first):
        # An exception without frames.
        return _with_message(lines)
    if first == _HEADER:
        start = 1
    elif _HEADER in lines:
        start = len(lines) - lines[::-1].index(_HEADER)
    else:
        # The beginning was cut off. It may have been the header of a group.
        start = next((number for number, line in enumerate(lines) if _FRAME.match(line)), len(lines))
    for number in range(start, len(lines)):
        if lines[number].strip() and not lines[number].startswith(" "):
            return None if lines[number].startswith(_CUT) else _with_message(lines[number:])
    return None


def _with_message(lines: list[str]) -> str:
    """The first line, with the second one if the message begins with a line break."""
    if lines[0].endswith(": ") and len(lines) > 1 and lines[1].strip() and lines[1] not in _CHAINED:
        return lines[0] + lines[1].strip()
    return lines[0]
