"""What drivers' errors say."""

from __future__ import annotations

from collections.abc import Iterator


def first_line(error: BaseException) -> str:
    """Return the first line of a Postgres error, which says what happened; the others have details and advice."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, with the driver's errors that SQLAlchemy's carry as ``orig``."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        if isinstance(driver := getattr(error, "orig", None), BaseException):
            yield driver
        error = error.__cause__
