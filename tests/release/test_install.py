"""`make test-dist`: the wheel with each extra, in the newest versions that the package index has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from quickstart_support import empty_home, quickstart, type_in
from wheel_support import ROOT, environment, pip

from release.build import build

# What the documentation imports, by extra.
IMPORTS = {
    "": "from outbox import AsyncOutbox, Event, Outbox, outbox_tables; Outbox(), AsyncOutbox()",
    "psycopg": "import psycopg; from outbox.urls import display_url; display_url('postgresql://localhost/shop')",
    "django": "import django, django.conf; django.conf.settings.configure(INSTALLED_APPS=['outbox.django']); "
    "django.setup(); import outbox.django.operations; from outbox.django import outbox",
    "relay": "import relay.wiring, relay.wal.source, relay.cli.doctor",
    "spark": "import spark_jobs.order_totals, spark_jobs.spark.installed as it; it.require_installed()",
    "schemas": "from spark_jobs import Avro, Protobuf, Registry; import fastavro, jsonschema.validators; "
    "import google.protobuf; Registry('http://localhost').client()",
    "sandbox": "from outbox.sandbox import _pgbin, jars, kafka, postgres; _pgbin.binaries(None); jars.repository()",
    "web": "from relay.page import create_page; import relay.page.server",
    "all": "import relay.page.server, spark_jobs.order_totals, outbox.sandbox.sandbox",
}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    return build(ROOT, folder / "work", folder / "dist").wheel


@pytest.mark.parametrize("extra", IMPORTS)
def test_an_extra_from_the_index(wheel, tmp_path, extra):
    scripts = environment(tmp_path / "venv")
    pip(scripts, "install", "--no-compile", f"outbox-kafka[{extra}] @ {wheel.as_uri()}" if extra else str(wheel))
    pip(scripts, "check")
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        given = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True, "check": False}
        return subprocess.run([str(scripts / command[0]), *command[1:]], **given)

    done = run("python", "-c", IMPORTS[extra])
    assert done.returncode == 0, done.stderr
    shown = run("outbox", "--help")
    if extra in {"", "psycopg", "django"}:
        assert (shown.returncode, "outbox-kafka[relay]" in shown.stderr) == (1, True)
    else:
        assert (shown.returncode, "dead-letters" in shown.stdout) == (0, True), shown.stderr


def test_the_quickstart_from_its_first_line(wheel):
    """README.md: with a virtual environment and pip, which finds this wheel where the text names the project."""
    shell = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    shell["PIP_CACHE_DIR"] = subprocess.run(
        [sys.executable, "-m", "pip", "cache", "dir"], check=True, capture_output=True, text=True
    ).stdout.strip()
    shell["PIP_FIND_LINKS"] = f"{shell.get('PIP_FIND_LINKS', '')} {wheel.parent}"
    shell["PATH"] = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), os.environ["PATH"]])
    typed, _, _ = quickstart()
    with empty_home() as home:
        type_in(home, typed, shell, 600)
        [record] = home.glob("work/.venv/lib/*/site-packages/outbox_kafka-*.dist-info/METADATA")
        with ZipFile(wheel) as archive:
            assert record.read_bytes() == archive.read(f"{record.parent.name}/METADATA")
