"""Assembles the command line from its groups. Heavy libraries are imported inside the commands."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from outbox import __version__
from outbox._app.console import failing_clearly

_GROUPS: Final = {
    **{name: f"relay.cli.{name}" for name in ("relay", "db", "cdc", "scheduled", "audit", "contracts")},
    "sandbox": "outbox.sandbox.cli",
    "dead-letters": "relay.cli.dead_letters",
    **{name: f"spark_jobs.cli.{name}" for name in ("consumers", "offsets", "external")},
}
"""Groups of commands, each with the module that has it as ``app``."""

_COMMANDS: Final = {
    "status": "relay.cli.status",
    "trace": "relay.cli.trace",
    "web": "relay.cli.web",
    "doctor": "relay.cli.doctor",
    "asyncapi": "relay.cli.contracts",
    "replay": "relay.cli.replay",
    "recover": "relay.cli.recover",
    "consume": "spark_jobs.cli.consume",
}
"""Commands, each with the module that has a function of that name."""


class _Commands(TyperGroup):
    """The commands, whose errors are one clear line."""

    def invoke(self, ctx: Any) -> Any:
        with failing_clearly():
            return super().invoke(ctx)


def assemble(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line, or only the part that these arguments need: ``relay run`` starts without the others.

    The others are omitted only if the first argument names a group or a command, so help and errors stay the same.
    """
    named = arguments[0] if arguments else None
    app = typer.Typer(
        name="outbox",
        cls=_Commands,
        help="Events from Postgres to Kafka to the sink's tables: once, in order per key.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=True,
    )
    app.callback()(_root)
    only = named if named in {*_GROUPS, *_COMMANDS} else None
    for name, module in _GROUPS.items():
        if only in {None, name}:
            group = import_module(module).app
            for command in group.registered_commands:
                command.help = _unwrapped(command.callback.__doc__)
            app.add_typer(group, name=name)
    for name, module in _COMMANDS.items():
        if only in {None, name}:
            function = getattr(import_module(module), name)
            app.command(name, help=_unwrapped(function.__doc__))(function)
    return app


def _unwrapped(text: str | None) -> str:
    """Return a docstring with each paragraph on one line: typer keeps line ends, and a terminal has another width."""
    paragraphs = inspect.cleandoc(text or "").replace("``", "`").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"outbox {__version__}")
        raise typer.Exit


def _root(
    _version_option: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
