"""What the commands share: errors as one clear line, and a JSON object as the last line of stdout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import orjson
import typer

from outbox.errors import ConfigurationError, OutboxError

P = ParamSpec("P")
R = TypeVar("R")


def failing_clearly(command: Callable[P, R]) -> Callable[P, R]:
    """Show an OutboxError as one line on stderr: status 2 for settings, 1 for the rest. Bugs keep their traceback."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except ConfigurationError as error:
            typer.echo(f"outbox: {error}", err=True)
            raise typer.Exit(2) from None
        except OutboxError as error:
            typer.echo(f"outbox: {error}", err=True)
            raise typer.Exit(1) from None

    return wrapper


def print_json(values: Mapping[str, Any]) -> None:
    """Print one object on a line of its own."""
    typer.echo(orjson.dumps(values).decode())
