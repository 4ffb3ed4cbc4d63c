"""What drivers' errors say."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of a Postgres error, which says what happened; the others have details and advice."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
