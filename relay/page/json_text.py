"""JSON on several lines, for people who read it."""

from __future__ import annotations

import re
from typing import Final

import orjson

_DEEPEST: Final = 40
"""Levels that are indented: what is below them would be mostly spaces."""
_LONGEST: Final = 100_000
"""Characters: lists in lists would become many times as long."""
_PART: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]\s*[\]}]|[\[\]{},:]|[^\s"\[\]{},:]+')


def pretty(text: str) -> str:
    """Return JSON with a line for each member; any other text, and a very long one, as it is.

    Only the space between its parts is changed: numbers that a parser would round and names that occur twice stay.
    """
    if len(text) > _LONGEST:
        return text
    try:
        orjson.loads(text)
    except ValueError:
        return text
    parts: list[str] = []
    depth = 0
    for part in _PART.findall(text):
        if part in "]}":
            depth -= 1
            parts.append(_line(depth))
        parts.append(part)
        if part in "[{":
            depth += 1
            parts.append(_line(depth))
        elif part == ",":
            parts.append(_line(depth))
        elif part == ":":
            parts.append(" ")
    return "".join(parts)


def _line(depth: int) -> str:
    return "\n" + "  " * min(depth, _DEEPEST)
