"""``outbox spark package | submit``: a consumer job on a Spark cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from outbox._app.console import failing_clearly
from outbox.errors import ConfigurationError
from spark_jobs.cli.names import load
from spark_jobs.settings import Settings

app = typer.Typer(help="Run a consumer job on a Spark cluster.", no_args_is_help=True)

_Job = Annotated[str, typer.Argument(help="MODULE:JOB, as in spark_jobs.order_totals:job", metavar="MODULE:JOB")]
_Include = Annotated[
    list[Path] | None, typer.Option(help="A file or folder that the job needs and no import leads to; repeatable.")
]


@app.command()
@failing_clearly
def package(
    job: _Job,
    output: Annotated[Path, typer.Option("--output", "-o", help="The zip to write.")] = Path("jobs.zip"),
    include: _Include = None,
) -> None:
    """Write the zip that makes a job importable on executors: its modules, what they import, and ours.

    What is installed with pip is not in it; the command names what executors need installed.
    """
    from spark_jobs.spark.package import collect

    sys.path.insert(0, str(Path.cwd()))
    found = collect(job, include or ())
    found.write(output)
    typer.echo(f"{output}: {len(found.files)} files for {job}")
    typer.echo(f"Executors need Python {sys.version_info[0]}.{sys.version_info[1]} with {', '.join(found.requires)}.")


@app.command(context_settings={"allow_extra_args": True})
@failing_clearly
def submit(
    context: typer.Context,
    job: _Job,
    once: Annotated[bool, typer.Option("--once", help="Apply what is there now, then end.")] = False,
    continuous: Annotated[bool, typer.Option("--continuous", help="Apply what comes, until SIGTERM.")] = False,
    master: Annotated[str | None, typer.Option(help="Spark's master; local[2,4] if not given.")] = None,
    deploy_mode: Annotated[
        str | None, typer.Option(help="client: the driver runs here (default). cluster: it runs there.")
    ] = None,
    conf: Annotated[list[str] | None, typer.Option(help="A property, spark.NAME=VALUE; repeatable.")] = None,
    properties_file: Annotated[
        Path | None, typer.Option(help="A file of properties; the place for those that hold a secret.")
    ] = None,
    packages: Annotated[
        str | None,
        typer.Option(help="Maven coordinates of what the job's transform needs; OUTBOX_SPARK_PACKAGES"),
    ] = None,
    jars: Annotated[list[str] | None, typer.Option(help="A jar, instead of packages; repeatable.")] = None,
    python: Annotated[str | None, typer.Option(help="Python of the executors; python3 if not given.")] = None,
    zip_file: Annotated[
        str | None, typer.Option("--zip", help="From `outbox spark package`; made anew if not given.")
    ] = None,
    entry: Annotated[
        str | None, typer.Option(help="Where spark_jobs/cli/submitted.py is for a driver that runs elsewhere.")
    ] = None,
    include: _Include = None,
    show: Annotated[bool, typer.Option("--print", help="Print the command and do nothing.")] = False,
) -> None:
    """Run a job with spark-submit. Arguments after `--` are for `outbox consume`, such as `-- --max-records 50000`.

    Addresses and credentials come from OUTBOX_… variables or outbox.toml where the driver runs, never from the command
    line.
    """
    if once == continuous:
        raise ConfigurationError("say either --once or --continuous")
    if deploy_mode not in {None, "client", "cluster"}:
        raise ConfigurationError("--deploy-mode: client or cluster")
    from spark_jobs.spark.installed import require_installed

    require_installed()
    from spark_jobs.spark.package import collect
    from spark_jobs.spark.session import DEFAULT_MASTER, REQUIRED_CONF
    from spark_jobs.spark.submit import Submission, holds_secret, installed_spark, properties

    settings = load(spark_packages=packages)
    sys.path.insert(0, str(Path.cwd()))
    found = collect(job, include or ())
    spark = installed_spark()
    master = master or DEFAULT_MASTER
    here = deploy_mode != "cluster"
    interpreters: dict[str, str] = {"spark.pyspark.driver.python": sys.executable} if here else {}
    if python or master.startswith("local"):
        interpreters["spark.pyspark.python"] = python or sys.executable
    # The driver reads secrets from its own settings.
    ours = {name: value for name, value in settings.spark.conf.items() if not holds_secret(name, value)}
    command = Submission(
        program=str(spark.program),
        entry=entry or str(Path(__file__).with_name("submitted.py")),
        zip=zip_file or "jobs.zip",
        name=f"outbox {job}",
        arguments=["consume", job, "--once" if once else "--continuous", *context.args],
        master=master,
        deploy_mode=deploy_mode,
        packages=settings.spark_packages,
        jars=jars or (),
        conf=interpreters | ours | properties(conf or []) | REQUIRED_CONF,
        properties_file=None if properties_file is None else str(properties_file),
    )
    if show:
        typer.echo(command.shown())
        if zip_file is None:
            typer.echo(f"Before it: outbox spark package {job} -o jobs.zip", err=True)
        return
    if here:
        _require_servers(settings)
    with tempfile.TemporaryDirectory(prefix="outbox-submit-") as folder:
        if zip_file is None:
            from dataclasses import replace

            command = replace(command, zip=str(Path(folder) / "jobs.zip"))
            found.write(Path(command.zip))
        status = _run(command.command(), Path(folder) / "pid", wait_for_driver=here)
    raise typer.Exit(status)


def _require_servers(settings: Settings) -> None:
    """Raise ConfigurationError for missing settings now, instead of after half a minute of Spark's start."""
    settings.require_database()
    settings.require_kafka()


def _run(command: list[str], pid_file: Path, *, wait_for_driver: bool) -> int:
    """Run spark-submit and return its exit status.

    SIGTERM and SIGINT are passed to the driver, which finishes its round; spark-submit would end it at once. A driver
    in the cluster is not signalled and continues.
    """
    from spark_jobs.cli.submitted import PID_FILE

    def end(number: int, _frame: Any) -> None:
        driver = pid_file.read_text() if wait_for_driver and pid_file.exists() else ""
        try:
            os.kill(int(driver) if driver else process.pid, signal.SIGTERM if driver else number)
        except ProcessLookupError:
            return  # the driver has ended, and spark-submit is about to

    # In a session of its own: otherwise Ctrl-C in a terminal would also end the JVM, while the driver still needs it.
    process = subprocess.Popen(command, env=os.environ | {PID_FILE: str(pid_file)}, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return process.wait()
