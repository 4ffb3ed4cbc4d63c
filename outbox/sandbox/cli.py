"""``outbox sandbox up | status | down``: a real Postgres and a real Kafka on this machine, without Docker."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox._app.console import AsJson, print_json
from outbox.sandbox.versions import DEFAULT, KAFKA_VERSIONS
from outbox.urls import display_url

if TYPE_CHECKING:
    from outbox.sandbox.sandbox import Sandbox, SandboxState

app = typer.Typer(
    help="A real Postgres and a real Kafka on this machine, without Docker. They run until `down`.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    from outbox._app import logs

    logs.configure()  # to standard error: the retries of a download must not mix with the result


@app.command()
def up(
    brokers: Annotated[int | None, typer.Option(help="1 or 3; an existing cluster keeps its number.")] = None,
    kafka: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help=f"One of {', '.join(KAFKA_VERSIONS)}; a new cluster is {DEFAULT}, an existing one keeps its version.",
        ),
    ] = None,
    json: AsJson = False,
    export: Annotated[bool, typer.Option("--export", help='Print export lines for a shell: eval "$(…)"')] = False,
) -> None:
    """Start the servers that do not run, and print their addresses. Data, ports and database stay the same."""
    state = _sandbox().up(brokers, kafka)
    if export:
        typer.echo(f"export OUTBOX_DATABASE_URL={shlex.quote(state.database_url)}")
        typer.echo(f"export OUTBOX_KAFKA__BOOTSTRAP_SERVERS={shlex.quote(state.bootstrap_servers)}")
    if json:
        print_json(_facts(state))
    elif not export:
        _show(state)


@app.command()
def status(json: AsJson = False) -> None:
    """Print what runs and where the logs are. Exit status 1 unless everything runs."""
    state = _sandbox().status()
    if json:
        print_json(_facts(state))
    else:
        _show(state)
    if not state.running:
        raise typer.Exit(1)


@app.command()
def down(
    purge: Annotated[bool, typer.Option("--purge", help="Remove the data as well.")] = False, json: AsJson = False
) -> None:
    """Stop the servers. The data is kept for the next `up`."""
    state = _sandbox().down(purge=purge)
    if json:
        print_json(_facts(state))


def _sandbox() -> Sandbox:
    from outbox._app.settings import check_environment
    from outbox.sandbox.sandbox import Sandbox

    check_environment()
    return Sandbox(report=lambda text: typer.echo(text, err=True))


def _facts(state: SandboxState) -> dict[str, Any]:
    return {
        "running": state.running,
        "database_url": state.database_url or None,
        "bootstrap_servers": state.bootstrap_servers or None,
        "postgres_running": state.postgres_running,
        "kafka_version": state.kafka_version or None,
        "brokers": state.brokers,
        "brokers_running": state.brokers_running,
        "directory": str(state.directory),
        "logs": [str(log) for log in (state.postgres_log, *state.kafka_logs) if log.exists()],
    }


def _show(state: SandboxState) -> None:
    if not state.database_url and not state.bootstrap_servers:
        typer.echo(f"There is no sandbox in {state.directory}. Start one: outbox sandbox up")
        return
    postgres = "running" if state.postgres_running else "stopped"
    # Without the password: screens are shared.
    typer.echo(f"Postgres  {postgres:<12} {display_url(state.database_url) if state.database_url else ''}")
    kafka = "running" if state.brokers_running == state.brokers else f"{state.brokers_running} of {state.brokers} run"
    kafka = kafka if state.brokers_running else "stopped"
    typer.echo(f"Kafka     {kafka:<12} {state.bootstrap_servers} (version {state.kafka_version})")
    typer.echo(f"Home      {state.directory}")
    typer.echo(f"Logs      {' '.join(str(log) for log in (state.postgres_log, *state.kafka_logs))}")
    if state.running:
        typer.echo('For a shell: eval "$(outbox sandbox up --export)"')
