"""The zip for executors and the command line of spark-submit: what is in them, and what is refused."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pyspark
import pytest
from typer.testing import CliRunner

from outbox.consumer.errors import JobError
from relay.cli.app import app
from spark_jobs.spark.package import EXECUTORS_NEED, MANIFEST, collect

JOB = """
from spark_jobs.job import ConsumerJob
{more}
job = ConsumerJob(group="g", topics=["t"], effect={effect})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder on sys.path; what was imported from it is forgotten again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"jobs", "shop", "first", "one", "two"}:
            del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    importlib.invalidate_caches()


def mine(spec: str, *include: Path) -> list[str]:
    """The files of the zip that are not ours."""
    files = collect(spec, include).files
    return [name for name in files if not name.startswith(("outbox/", "spark_jobs/")) and name != MANIFEST]


def test_a_module_and_what_it_imports(folder):
    """Top level, inside functions, relative, in a folder without __init__.py; not what only type checkers see."""
    more = "import first\nfrom jobs import second\nfrom . import third\nimport typing\n"
    more += "if typing.TYPE_CHECKING:\n    import never\n"
    write(
        folder,
        {
            "jobs/orders.py": JOB.format(more=more, effect="first.effect"),
            "jobs/second.py": "def late():\n    import shop.prices.net\n",
            "jobs/third.py": "try:\n    import not_there\nexcept ImportError:\n    pass\n",
            "jobs/unrelated.py": "",
            "first.py": "import json\nimport psycopg\n\n\ndef effect(cursor, table):\n    pass\n",
            "shop/__init__.py": "",
            "shop/prices/__init__.py": "",
            "shop/prices/net.py": "",
            "shop/prices/rates.csv": "1,2\n",
            "shop/prices/__pycache__/net.cpython-311.pyc": "",
            "shop/.hidden": "",
            "never.py": "",
        },
    )
    packed = ["first.py", "jobs/orders.py", "jobs/second.py", "jobs/third.py"]
    shop = ["shop/__init__.py", "shop/prices/__init__.py", "shop/prices/net.py", "shop/prices/rates.csv"]
    assert mine("jobs.orders:job") == packed + shop
    (folder / "more").mkdir()
    (folder / "more" / "table.json").write_text("{}")
    assert mine("jobs.orders:job", folder / "more", folder / "never.py") == sorted(
        [*packed, *shop, "more/table.json", "never.py"]
    )
    with pytest.raises(JobError, match="no such file or folder"):
        collect("jobs.orders:job", [folder / "nowhere"])
    (folder / "more" / "first.py").write_text("x = 1\n")
    with pytest.raises(JobError, match=r"has another first\.py"):
        collect("jobs.orders:job", [folder / "more" / "first.py"])


def test_our_own_modules_are_all_that_is_in_it_for_a_job_of_ours():
    found = collect("spark_jobs.order_totals:job")
    assert mine("spark_jobs.order_totals:job") == []
    assert {"outbox/errors.py", "spark_jobs/task/partition.py"} <= set(found.files)
    assert not [
        name
        for name in found.files
        if name.startswith(("outbox/testing", "outbox/sandbox", "relay", "outbox/migrations"))
    ]
    assert not [name for name in found.files if "__pycache__" in name]
    assert found.requires == EXECUTORS_NEED


def test_what_a_decoder_needs_is_named(folder):
    more = "from spark_jobs.payloads.decoding import Avro\n"
    text = JOB.format(more=more, effect="'SELECT 1', schema=Avro(registry='http://registry', subject='t-value')")
    write(folder, {"one.py": text})
    assert set(collect("one:job").requires) - set(EXECUTORS_NEED) == {"fastavro", "confluent-kafka[schemaregistry]"}


def test_the_same_bytes_whenever_and_wherever(folder):
    write(
        folder, {"jobs/orders.py": JOB.format(more="import b\nimport a", effect="'SELECT 1'"), "a.py": "", "b.py": ""}
    )
    collect("jobs.orders:job").write(folder / "one.zip")
    for path in folder.rglob("*.py"):
        os.utime(path, (0, 0))
        path.chmod(0o600)
    collect("jobs.orders:job").write(folder / "two.zip")
    assert (folder / "one.zip").read_bytes() == (folder / "two.zip").read_bytes()
    assert not list(folder.glob("*.part"))
    with zipfile.ZipFile(folder / "one.zip") as archive:
        assert archive.namelist() == sorted(archive.namelist())
        assert b'"job": "jobs.orders:job"' in archive.read(MANIFEST)


def test_executors_import_the_job_from_the_zip_and_nothing_else(folder):
    """In an interpreter without this repository: every module of ours that tasks load, and only what is named."""
    more = "from jobs import helper\n\n\ndef effect(cursor, table):\n    return helper.VALUE\n"
    write(folder, {"jobs/orders.py": JOB.format(more=more, effect="effect"), "jobs/helper.py": "VALUE = 7\n"})
    collect("jobs.orders:job").write(folder / "jobs.zip")
    script = """
import importlib.metadata, sys
sys.path.insert(0, sys.argv[1])
import jobs.orders, spark_jobs.task.partition, spark_jobs.payloads.json_text, outbox
assert jobs.orders.job.effect(None, None) == 7
ours = (jobs.orders, spark_jobs.task.partition, outbox)
assert all(m.__file__.startswith(sys.argv[1]) for m in ours), outbox.__file__
tops = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
known = importlib.metadata.packages_distributions()
print(*sorted({known[top][0].lower().replace("_", "-") for top in tops if top in known}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder / "jobs.zip")],
        cwd=folder / "jobs",
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Beside what has to be installed: what that brings along.
    brought = {"typing-extensions", "psycopg-binary", "greenlet", "numpy", "cython"}
    about = {"pyspark", "py4j", "setuptools", "outbox-kafka"}
    if pyspark.__version__.startswith("4.1."):
        about.add("psutil")  # which pyspark itself imports there, where it is installed
    assert set(done.stdout.split()) <= {*EXECUTORS_NEED, *brought, *about}


def test_what_can_not_go_into_a_zip(folder):
    write(
        folder,
        {
            "native/__init__.py": "",
            "native/fast.cpython-311-x86_64-linux-gnu.so": "",
            "one.py": JOB.format(more="def late():\n    import native", effect="'SELECT 1'"),
            "two.py": JOB.format(more="def effect(c, t):\n    pass\neffect.__module__ = '__main__'", effect="effect"),
            "wheel.whl": "",
        },
    )
    with pytest.raises(JobError, match=r"fast.*\.so is native code"):
        collect("one:job")
    with pytest.raises(JobError, match="is in __main__"):
        collect("two:job")
    with pytest.raises(JobError, match="can't import __main__"):
        collect("__main__:job")
    with pytest.raises(JobError, match="an archive inside the zip"):
        collect("spark_jobs.order_totals:job", [folder / "wheel.whl"])
    with pytest.raises(JobError, match="can't be written"):
        collect("spark_jobs.order_totals:job").write(folder / "nowhere" / "jobs.zip")


def command(*arguments: str, **env: str) -> tuple[int, str, str]:
    """``outbox spark …``: exit status, output, errors."""
    done = CliRunner().invoke(app, ["spark", *arguments], env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_the_zip_and_the_command_that_runs_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write(folder, {"one.py": JOB.format(more="", effect="'SELECT 1'")})
    status, output, errors = command(
        "package", "one:job", "-o", "my jobs.zip", OUTBOX_DATABASE_URL="postgresql://u:hidden@h/db"
    )
    assert (status, errors, "hidden" in output) == (0, "", False)
    assert "uuid-utils" in output
    assert "one.py" in zipfile.ZipFile(folder / "my jobs.zip").namelist()
    shown = output[output.index("spark-submit") :]
    words = shlex.split(shown.replace("\\\n", " "))
    assert words[:5] == ["spark-submit", "--name", "outbox one:job", "--py-files", "my jobs.zip"]
    assert words[words.index("--conf") + 1] == f"spark.pyspark.driver.python={sys.executable}"
    assert "--packages" not in words
    assert words[-3:] == ["consume", "one:job", "--once"]
    assert Path(words[-4]).name == "submitted.py"
    assert Path(words[-4]).is_file()
    _, output, _ = command("package", "one:job", OUTBOX_SPARK_PACKAGES="g:a:1")
    assert "--packages g:a:1 \\\n" in output


@pytest.mark.parametrize(
    ("job", "status", "shown"),
    [("nowhere:job", 2, "no module nowhere"), ("__main__:job", 1, "can't import __main__")],
)
def test_what_the_command_refuses(folder, monkeypatch, job, status, shown):
    monkeypatch.chdir(folder)
    found = command("package", job)
    assert (found[0], found[1]) == (status, "")
    assert shown in found[2]
    assert found[2].count("\n") == 1
