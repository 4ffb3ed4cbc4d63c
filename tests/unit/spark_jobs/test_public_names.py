"""What ``from spark_jobs import …`` gives, what it costs, and what is in its way."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import outbox.consumer
import spark_jobs
from outbox.consumer.errors import EffectFailed, JobError
from spark_jobs.spark import errors as failures
from spark_jobs.spark import session

ROOT = Path(__file__).parents[3]
HEAVY = ("pyspark", "confluent_kafka", "pandas", "pyarrow", "numpy", "sqlalchemy", "psycopg", "pydantic")


def python(code: str, **given: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, **given
    )


def test_a_job_without_the_extra_says_which_one_is_missing():
    done = python("import sys; sys.modules['psycopg'] = None; from spark_jobs import ConsumerJob")
    assert "MissingExtra: psycopg is not installed; run: pip install 'outbox-kafka[spark]'" in done.stderr
    # What a module of the project itself lacks is no missing extra.
    done = python("import sys; sys.modules['spark_jobs.job'] = None; from spark_jobs import ConsumerJob")
    assert done.stderr.rstrip().rpartition("\n")[2].startswith("ModuleNotFoundError: ")


def test_every_public_name_is_where_it_is_said_to_be():
    for name, module in spark_jobs._WHERE.items():
        found = getattr(spark_jobs, name)
        assert found is getattr(importlib.import_module(module), name)
        assert found.__module__ == module
    assert sorted(spark_jobs._WHERE) == spark_jobs.__all__
    assert set(spark_jobs.__all__) <= set(dir(spark_jobs))
    with pytest.raises(ImportError, match="nothing_such"):
        exec("from spark_jobs import nothing_such")


def test_type_checkers_are_told_the_same():
    tree = ast.parse(Path(spark_jobs.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name: node.module for node in block.body for alias in node.names}
    assert told == spark_jobs._WHERE


def test_the_package_costs_nothing_and_a_job_no_spark():
    names = "ConsumerJob, Upsert, Insert, Dedup, Natural, Version, Fingerprint, Reject"
    steps = ("import sys, spark_jobs", f"from spark_jobs import {names}", "from spark_jobs import run, exactly_once")
    loaded = f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    package, job, program = python("\n".join(f"{step}; {loaded}" for step in steps), cwd=ROOT).stdout.splitlines()
    assert (package, job) == ("[]", "['psycopg']")
    # Executors import what a job's module imports, and have nothing of the settings.
    assert not {"pyspark", "pydantic"} & set(ast.literal_eval(program))


def test_consumer_groups_cost_neither_settings_nor_an_orm():
    """Services and executors import them. Only who makes the tables needs ``tables``, which are SQLAlchemy's."""
    names = [
        one.name
        for one in pkgutil.walk_packages(outbox.consumer.__path__, "outbox.consumer.")
        if one.name != "outbox.consumer.tables"
    ]
    assert {"outbox.consumer.groups", "outbox.consumer.admin.offsets"} <= set(names)
    found = python(f"import sys, {', '.join(names)}; print(sorted(set({HEAVY!r}) & set(sys.modules)))", cwd=ROOT)
    assert found.stdout == "['confluent_kafka', 'psycopg']\n", found.stderr


@pytest.mark.parametrize("command", [["consumers", "groups"], ["consume", "spark_jobs.order_totals:job", "--once"]])
def test_the_command_tells_what_hides_its_package(tmp_path, command):
    (tmp_path / "spark_jobs").mkdir()
    (tmp_path / "spark_jobs" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    code = "import sys; from relay.cli import main; sys.argv[0] = 'outbox'; main()"
    found = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert found.returncode == 2, found.stderr
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"outbox: {tmp_path / 'spark_jobs'} hides the package of the same name")


def test_what_hides_the_package_from_workers(tmp_path):
    ours = str(ROOT)
    session.require_not_hidden([str(tmp_path), ours])
    (tmp_path / "spark_jobs.py").touch()
    # Behind ours it hides nothing.
    session.require_not_hidden([ours, str(tmp_path)])
    with pytest.raises(JobError, match=r"spark_jobs\.py hides the package spark_jobs"):
        session.require_not_hidden([str(tmp_path), ours])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "x\nModuleNotFoundError: No module named 'spark_jobs.task.partition'; 'spark_jobs' is not a package\n",
            JobError,
        ),
        ("ImportError: cannot import name 'task' from 'spark_jobs' (/home/u/spark_jobs/__init__.py)", JobError),
        ("AttributeError: Can't get attribute 'run' on <module 'spark_jobs.task.partition' from '/a'>", JobError),
        ("ModuleNotFoundError: No module named 'mine'", EffectFailed),
    ],
)
def test_what_hides_it_on_a_cluster_is_told_too(text, kind):
    found = failures.of_spark(Exception(text))
    assert isinstance(found, kind)
    assert ("hides the package" in str(found)) == (kind is JobError)
