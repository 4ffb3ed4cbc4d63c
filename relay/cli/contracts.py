"""``outbox asyncapi`` and ``outbox contracts``: what a service's events are, and what a new version breaks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from outbox._app.console import AsJson, print_json, printable
from outbox.errors import ConfigurationError
from relay.config import load
from relay.operations.contracts import Breaking, compare, read
from relay.operations.job_contract import compare_job, compare_jobs, is_job, read_job

app = typer.Typer(help="The contract with consumers, as `outbox asyncapi` prints it.", no_args_is_help=True)


@app.command()
def check(
    old: Annotated[str, typer.Argument(help="The document, or MODULE:JOB, in production.")],
    new: Annotated[str, typer.Argument(help="The document, or MODULE:JOB, that comes next.")],
    topic: Annotated[list[str] | None, typer.Option(help="Compare this topic instead of the job's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare AsyncAPI documents and consumer jobs, and name each change that breaks a reader.

    Two documents: readers of old or of new events. A document and a job, either of them the new one: what the job can't
    read of the documented events. Two jobs: what the new one can't read of what the old one reads.

    Exit status 1 for a change that breaks, 2 for a document or a job that can't be read.
    """
    found = _compare(old, new, topic or ())
    if as_json:
        print_json({"breaking": [one._asdict() for one in found]})
    else:
        for one in found:
            typer.echo(f"breaking: {printable(str(one))}")
        if not found:
            typer.echo("nothing breaks")
    if found:
        raise typer.Exit(1)


def _compare(old: str, new: str, topics: Sequence[str]) -> list[Breaking]:
    # A job may be in the working directory, as with `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    jobs = [read_job(one) for one in (old, new) if is_job(one)]
    documents = [read(Path(one)) for one in (old, new) if not is_job(one)]
    if jobs and documents:
        return compare_job(jobs[0], documents[0], topics)
    if topics:
        raise ConfigurationError("--topic: goes with a job and a document")
    return compare_jobs(*jobs) if jobs else compare(*documents)


def asyncapi(
    models: Annotated[list[str], typer.Option("--models", help="A module that registers event models; repeatable.")],
    title: Annotated[str, typer.Option("--title", help="The document's title.")] = "Events",
    version: Annotated[str, typer.Option("--document-version", help="The document's version.")] = "1.0.0",
) -> None:
    """Print an AsyncAPI 3.0 document (JSON) of the registered events: topics, headers, keys, payloads.

    Needs neither Postgres nor Kafka.
    """
    from relay.operations.asyncapi import document, import_models

    settings = load()
    typer.echo(json.dumps(document(import_models(models), settings, title, version), indent=2))
