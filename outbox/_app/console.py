"""Parts that all commands share: options, errors as one clear line, and a JSON object as the last line of stdout."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
import typer

from outbox.errors import ConfigurationError, OutboxError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DatabaseUrl = Annotated[str | None, typer.Option("--database-url", help="OUTBOX_DATABASE_URL")]
SinkUrl = Annotated[str | None, typer.Option("--database-url", help="The sink's database; OUTBOX_DATABASE_URL")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Why; it is kept in the audit.")]


@contextmanager
def failing_clearly() -> Iterator[None]:
    """Print an OutboxError as one line on stderr: status 2 for settings, 1 for the rest. Bugs keep their traceback."""
    try:
        yield
    except OutboxError as error:
        say(f"outbox: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from None


def require_reason(reason: str | None, what: str, *, needed: bool = True) -> str:
    """Return --reason. Raises ConfigurationError for a blank one; ``what`` is what it should say.

    It is not ``needed`` where nothing is kept in the audit, as in a dry run.
    """
    if needed and not (reason or "").strip():
        raise ConfigurationError(f"--reason: say {what}")
    return reason or ""


def require_choice(ids: Sequence[object] | None, everything: bool, these: str, some: str) -> None:
    """Raise ConfigurationError unless there are either ids or --all. ``these`` and ``some`` name ids and filters."""
    if bool(ids) == everything:
        raise ConfigurationError(f"say which: {these}, or --all (with {some})")


def print_json(values: Mapping[str, Any], *, indented: bool = False) -> None:
    """Print one object on a line of its own, or ``indented`` on several. Unprintable characters are escaped."""
    text = orjson.dumps(values, option=orjson.OPT_INDENT_2 if indented else None).decode()
    # Outside of strings there are only ASCII characters; what is escaped means the same.
    typer.echo(_UNPRINTABLE.sub(lambda found: found[0] if found[0].isprintable() else _as_json(found[0]), text))


_UNPRINTABLE: Final = re.compile(r"[^\n -~]")


def _as_json(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{int.from_bytes(units[at : at + 2]):04x}" for at in range(0, len(units), 2))


def printable(text: str, but: str = "") -> str:
    """Return a text with control characters escaped, ``but`` these: what others wrote can't affect a terminal."""
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode() for c in text)


def say(text: str, *, err: bool = False) -> None:
    """Print lines of text that may hold what others wrote: keys, errors, names. Only line ends affect the terminal."""
    typer.echo(printable(text, but="\n"), err=err)


def say_if_more(found: int, limit: int) -> None:
    """Say that there are more than ``limit``, if one more was looked for and ``found``."""
    if found > limit:
        say("there are more; see --limit")


def table_console() -> Console:
    """Return a console for tables, 200 columns wide when the output is not a terminal."""
    from rich.console import Console

    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def text_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of texts, with control characters escaped."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
