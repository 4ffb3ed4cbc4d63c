"""Counts as text."""

from __future__ import annotations


def counted(count: int, noun: str, verb: str = "") -> str:
    """Return a number of things, with ``is`` or ``was`` in its form: "1 event", "2,000 events were"."""
    verb = f" {verb if count == 1 else {'is': 'are', 'was': 'were'}[verb]}" if verb else ""
    return f"{count:,} {noun}{'' if count == 1 else 's'}{verb}"
