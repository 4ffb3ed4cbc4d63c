"""``outbox spark package``: a consumer job for a Spark cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from outbox._app.console import failing_clearly
from outbox._app.settings import load

app = typer.Typer(help="Run a consumer job on a Spark cluster.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
@failing_clearly
def package(
    job: Annotated[str, typer.Argument(help="MODULE:JOB, as in spark_jobs.order_totals:job", metavar="MODULE:JOB")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The zip to write.")] = Path("jobs.zip"),
    include: Annotated[
        list[Path] | None, typer.Option(help="A file or folder that the job needs and does not import; repeatable.")
    ] = None,
) -> None:
    """Write the zip that makes a job importable on executors: its modules, what they import, and ours.

    Packages that are installed with pip are not in it; the command lists those that executors need. It also prints the
    spark-submit command that runs the job.
    """
    from spark_jobs.spark.package import collect

    settings = load()
    sys.path.insert(0, str(Path.cwd()))
    found = collect(job, include or ())
    found.write(output)
    typer.echo(f"{output}: {len(found.files)} files for {job}")
    typer.echo(f"Executors need Python {sys.version_info[0]}.{sys.version_info[1]} with {', '.join(found.requires)}.")
    typer.echo("To run it, add your cluster's options to:\n")
    typer.echo(_submit_command(job, output, settings.spark_packages))


def _submit_command(job: str, zip_file: Path, packages: str | None) -> str:
    """Return the command for a shell, with one option per line.

    Addresses and credentials are not in it: everyone on the machine can read a command line. The driver reads them from
    ``OUTBOX_…`` variables or outbox.toml.
    """
    lines = [["spark-submit"], ["--name", f"outbox {job}"], ["--py-files", str(zip_file)]]
    if packages:
        lines.append(["--packages", packages])
    lines += [
        ["--conf", f"spark.pyspark.driver.python={sys.executable}"],
        [str(Path(__file__).with_name("submitted.py"))],
        ["consume", job, "--once"],
    ]
    return " \\\n  ".join(shlex.join(line) for line in lines)
