"""The wheel as users install it: the library alone is light, and everything it needs is inside."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    [built] = folder.glob("*.whl")
    return built


def pip(python: str, *arguments: str) -> str:
    """Run our pip for another environment, which is made sooner without one."""
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment(folder: Path, *packages: str) -> str:
    """Make an environment with these packages and what they need; give its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = str(folder / "venv" / "bin" / "python")
    pip(python, "install", "--no-compile", *packages)
    return python


def test_what_is_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "outbox/py.typed",
        "outbox/migrations/env.py",
        "outbox/migrations/versions/0001_outbox.py",
        "outbox/migrations/consumer/0001_consumer.py",
        "outbox/examples/shop/__main__.py",
        "outbox/sandbox/jars.lock",
        "relay/cli/app.py",
        "spark_jobs/order_totals.py",
    ):
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "migrations/", "benchmarks/"))]


def test_the_core_install_brings_neither_spark_nor_a_kafka_client(wheel, tmp_path):
    """Installed into an environment of its own, from the versions in the lock file."""
    constraints = tmp_path / "constraints.txt"
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    constraints.write_text("\n".join(line.rstrip("\\ ") for line in lines if not line.startswith("    ")))
    python = environment(tmp_path, "-c", str(constraints), str(wheel))
    listed = pip(python, "list", "--format=freeze").lower()
    assert "outbox-kafka" in listed
    for heavy in ("pyspark", "confluent", "pandas", "pyarrow", "typer", "alembic", "pydantic", "structlog"):
        assert heavy not in listed
    script = (
        "from outbox import Event, Outbox, AsyncOutbox, outbox_tables; import sqlalchemy as sa;"
        "outbox_tables(sa.MetaData()); print(Event('Order', '1', 'T', {'a': 1}).event_id.version)"
    )
    # psycopg needs libpq: the binary extra comes with [relay]; a service brings its own driver.
    pip(python, "install", "--no-compile", "psycopg-binary", "-c", str(constraints))
    done = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "7"
    command = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "outbox")], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert command.returncode == 1
    assert "pip install 'outbox-kafka[relay]'" in command.stderr


def test_the_oldest_sqlalchemy_and_psycopg_that_we_say_we_support(wheel, tmp_path, outbox_postgres):
    """The lower bounds of pyproject.toml, in an environment of their own: tables, writer, and what was written."""
    python = environment(tmp_path, str(wheel), "sqlalchemy==2.0.30", "psycopg[binary]==3.2.1", "orjson==3.10.0")
    script = f"""
import sqlalchemy as sa
from outbox import Event, Outbox, outbox_tables
engine = sa.create_engine({outbox_postgres.url.replace("postgresql://", "postgresql+psycopg://")!r})
with engine.begin() as connection:
    Outbox().add(connection, Event("Order", "1", "T", {{"a": 1}}), lock_key=True)
    Outbox().add_many(connection, [Event("Order", "1", "T"), Event("Order", "2", "T", b"x")])
metadata = sa.MetaData()
tables = outbox_tables(metadata, "another")
with engine.begin() as connection:
    connection.execute(sa.schema.CreateSchema("another"))
    metadata.create_all(connection)
    print(connection.execute(sa.text("SELECT count(*) FROM outbox.events")).scalar_one())
"""
    done = subprocess.run([python, "-c", script], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"
