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

from relay.cli.app import app
from spark_jobs.errors import JobError
from spark_jobs.spark.package import EXECUTORS_NEED, MANIFEST, collect
from spark_jobs.spark.submit import Submission, installed_spark, properties

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


def submission(**changes: object) -> Submission:
    given = {"program": "spark-submit", "entry": "/x/submitted.py", "zip": "my jobs.zip", "name": "outbox a:b"}
    return Submission(**(given | {"arguments": ["consume", "a:b", "--once"]} | changes))


def test_the_command_is_quoted_and_an_option_a_line():
    made = submission(master="spark://h:1", packages="g:a:1", conf={"spark.b": "x y", "spark.a": "1"})
    assert made.shown().splitlines() == [
        "spark-submit \\",
        "  --master spark://h:1 \\",
        "  --name 'outbox a:b' \\",
        "  --packages g:a:1 \\",
        "  --py-files 'my jobs.zip' \\",
        "  --conf spark.a=1 \\",
        "  --conf 'spark.b=x y' \\",
        "  /x/submitted.py \\",
        "  consume a:b --once",
    ]
    assert shlex.split(made.shown().replace("\\\n", " ")) == made.command()
    jars = submission(packages="g:a:1", jars=["/a.jar", "/b.jar"]).command()
    assert jars[jars.index("--jars") + 1] == "/a.jar,/b.jar"
    assert "--packages" not in jars


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.hadoop.fs.s3a.secret.key", "x"),
        ("spark.ssl.keyPassword", "x"),
        ("spark.yarn.appMasterEnv.OUTBOX_DATABASE_URL", "postgresql://h/db"),
        ("spark.executorEnv.A", "postgresql://u:p@h/db"),
        ("spark.x.sasl.jaas.config", "x"),
    ],
)
def test_a_secret_does_not_get_onto_the_command_line(name, value):
    with pytest.raises(JobError, match="--properties-file") as caught:
        submission(conf={name: value})
    assert value not in str(caught.value).replace(name, "")


def test_what_else_is_refused_and_what_is_not():
    submission(conf={"spark.kubernetes.driver.secretKeyRef.OUTBOX_DATABASE_URL": "sink:url"})
    submission(conf={"spark.authenticate.secret.file": "/etc/secret"})
    for arguments in (["--database-url", "postgresql://h/db"], ["--x", "postgresql://u:p@h/db"]):
        with pytest.raises(JobError, match="OUTBOX_DATABASE_URL"):
            submission(arguments=arguments)
    assert properties(["spark.a=b=c"]) == {"spark.a": "b=c"}
    for wrong in ("a=b", "spark.a"):
        with pytest.raises(JobError, match=r"spark\.NAME=VALUE"):
            properties([wrong])


def command(*arguments: str, **env: str) -> tuple[int, str, str]:
    """``outbox spark …``: exit status, output, errors."""
    done = CliRunner().invoke(app, ["spark", *arguments], env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_the_commands(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    write(folder, {"one.py": JOB.format(more="", effect="'SELECT 1'")})
    status, output, _ = command("package", "one:job", "-o", "my jobs.zip")
    assert (status, "my jobs.zip" in output, "uuid-utils" in output) == (0, True, True)
    assert "one.py" in zipfile.ZipFile(folder / "my jobs.zip").namelist()
    secret = "postgresql://u:hidden@h/db"
    options = ["--once", "--master", "spark://h:1", "--zip", "my jobs.zip", "--conf", "spark.x=y", "--print"]
    status, output, errors = command(
        "submit", "one:job", *options, "--", "--max-records", "5", OUTBOX_DATABASE_URL=secret
    )
    assert (status, errors) == (0, "")
    words = shlex.split(output.replace("\\\n", " "))
    assert Path(words[0]).name == "spark-submit"
    assert Path(words[0]).is_file()
    assert not {"--packages", "--jars"} & set(words)
    assert words[words.index("--py-files") + 1] == "my jobs.zip"
    assert {"spark.x=y", "spark.sql.session.timeZone=UTC", "spark.sql.adaptive.enabled=false"} <= set(words)
    assert words[-5:] == ["consume", "one:job", "--once", "--max-records", "5"]
    assert Path(words[-6]).name == "submitted.py"
    assert "hidden" not in output
    _, output, errors = command("submit", "one:job", "--once", "--print", OUTBOX_SPARK_PACKAGES="g:a:1")
    assert ("--packages g:a:1" in output, "outbox spark package one:job" in errors) == (True, True)
    assert not (folder / "jobs.zip").exists()


@pytest.mark.parametrize(
    ("arguments", "env", "status", "shown"),
    [
        (["submit", "spark_jobs.order_totals:job"], {}, 2, "--once or --continuous"),
        (["submit", "spark_jobs.order_totals:job", "--once"], {}, 2, "OUTBOX_DATABASE_URL"),
        (["submit", "spark_jobs.order_totals:job", "--once", "--deploy-mode", "x"], {}, 2, "client or cluster"),
        (["submit", "spark_jobs.order_totals:job", "--once", "--conf", "spark.x.password=1"], {}, 1, "properties-file"),
        (["submit", "spark_jobs.order_totals:job", "--once"], {"SPARK_HOME": "/nowhere"}, 1, "holds no Spark"),
        (["submit", "nowhere:job", "--once"], {}, 2, "no module nowhere"),
        (["package", "__main__:job"], {}, 1, "can't import __main__"),
    ],
)
def test_what_the_commands_refuse(folder, monkeypatch, arguments, env, status, shown):
    monkeypatch.chdir(folder)
    found = command(*arguments, **env)
    assert (found[0], found[1]) == (status, "")
    assert shown in found[2]
    assert found[2].count("\n") == 1


def test_a_spark_of_another_version_is_refused(folder, monkeypatch):
    write(folder, {"bin/spark-submit": "", "jars/spark-core_2.13-3.5.0.jar": ""})
    monkeypatch.setenv("SPARK_HOME", str(folder))
    with pytest.raises(JobError, match=r"is Spark 3\.5\.0, but pyspark .* is installed"):
        installed_spark()
