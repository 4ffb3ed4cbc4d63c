"""Which pysparks a consumer runs with, and which jars it gives them."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path

import pyspark
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from outbox.errors import ConfigurationError
from outbox.sandbox import jars
from relay.cli.app import app
from spark_jobs.spark import installed

ROOT = Path(__file__).parents[2]
CONNECTOR = "spark-sql-kafka-0-10_2.13"
CONSUME = ["consume", "spark_jobs.order_totals:job", "--once"]
SUBMIT = ["spark", "submit", "spark_jobs.order_totals:job", "--once", "--print", "--jars", "locked"]


def pinned(lock: str) -> str:
    """Return the version of pyspark in a lock file."""
    [version] = re.findall(r"^pyspark==(\S+) ", (ROOT / lock).read_text(), re.MULTILINE)
    return version


@pytest.mark.parametrize(
    ("version", "minor"), [("4.1.0", "4.1"), ("4.1.4", "4.1"), ("4.2.0", "4.2"), ("4.2.7.dev1", "4.2")]
)
def test_the_jars_are_those_of_the_pyspark_that_is_installed(monkeypatch, caplog, version, minor):
    monkeypatch.setattr(pyspark, "__version__", version)
    installed.require_installed()
    assert not caplog.records
    assert installed.supported_minor() == minor


def test_this_pyspark_has_its_jars():
    names = [path.name for path in installed.connector_jars()]
    (found,) = (name for name in names if CONNECTOR in name)
    assert f"{CONNECTOR}-{'.'.join(pyspark.__version__.split('.')[:2])}." in found


@pytest.mark.parametrize("version", ["2.4.8", "4.0.5", "3.10.0"])
@pytest.mark.parametrize("arguments", [CONSUME, SUBMIT])
def test_an_older_pyspark_is_an_error(monkeypatch, version, arguments):
    monkeypatch.setattr(pyspark, "__version__", version)
    with pytest.raises(ConfigurationError, match=rf"pyspark {re.escape(version)} is installed.*'pyspark>=4\.1,<4\.3'"):
        installed.require_installed()
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"pyspark {version} is installed, which the consumer does not support" in done.stderr


@pytest.mark.parametrize("version", ["4.3.0", "4.10.1", "5.0.0.dev1"])
def test_a_newer_pyspark_is_a_warning_and_brings_its_own_connector(monkeypatch, caplog, version):
    monkeypatch.setattr(pyspark, "__version__", version)
    with caplog.at_level(logging.WARNING):
        installed.require_installed()
    assert caplog.messages == [f"pyspark {version} is newer than what the consumer is tested with (4.1, 4.2)"]
    named = rf"OUTBOX_SPARK_PACKAGES=org\.apache\.spark:{re.escape(CONNECTOR)}:{re.escape(version)}"
    with pytest.raises(ConfigurationError, match=rf"no checked Kafka connector for it.*{named}"):
        installed.connector_jars()
    # Nothing is asked of either server before.
    servers = {"OUTBOX_DATABASE_URL": "postgresql://nowhere/x", "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": "nowhere:9092"}
    done = CliRunner().invoke(app, CONSUME, env=servers)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no checked Kafka connector" in done.stderr


def test_a_version_that_can_not_be_read_is_an_error(monkeypatch):
    monkeypatch.setattr(pyspark, "__version__", "unknown")
    with pytest.raises(ConfigurationError, match="'unknown', which can't be read"):
        installed.require_installed()


def test_each_supported_pyspark_has_its_connector_and_its_tests():
    """What has to change together when a version is added or dropped."""
    supported = installed.SUPPORTED
    sets = {jars.connector(minor): minor for minor in supported}
    assert set(jars.ROOTS) == {jars.KAFKA, *sets}
    for name, minor in sets.items():
        of_spark = [jar for jar in jars.locked(name) if jar.group == "org.apache.spark"]
        assert {jar.artifact for jar in of_spark} == {CONNECTOR, "spark-token-provider-kafka-0-10_2.13"}
        assert all(jar.version.startswith(f"{minor}.") for jar in of_spark), name
    # The newest is what `make test` runs; `make matrix` runs the others.
    assert pinned("requirements.lock").startswith(f"{supported[-1]}.")
    others = {lock.stem.removeprefix("pyspark-"): lock for lock in (ROOT / "tests").glob("pyspark-*.lock")}
    assert set(others) == set(supported[:-1])
    for minor, lock in others.items():
        assert pinned(str(lock)).startswith(f"{minor}.")


def test_pip_takes_what_is_supported_and_nothing_else():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bounds,) = (one.specifier for one in map(Requirement, extras["spark"]) if one.name == "pyspark")
    assert bounds == SpecifierSet(installed.BOUNDS)
    tried = [f"{major}.{minor}" for major in (3, 4, 5) for minor in range(12)]
    assert tuple(minor for minor in tried if f"{minor}.3" in bounds) == installed.SUPPORTED


def test_the_page_says_what_is_tested():
    """docs/reference/versions.md: its table has the versions of the locks, the jars and the project's metadata."""
    table = {
        line.split("|")[1].strip(): line.split("|")[2:5]
        for line in (ROOT / "docs" / "reference" / "versions.md").read_text().splitlines()
        if line.startswith("| ")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (broker,) = (jar.version for jar in jars.locked(jars.KAFKA) if jar.artifact == "kafka-server")
    said = {name: [set(re.findall(r"\d+(?:\.\d+)*", cell)) for cell in cells] for name, cells in table.items()}
    first, *others = (pinned(str(lock)) for lock in ("requirements.lock", *sorted((ROOT / "tests").glob("pyspark-*"))))
    assert said["pyspark"] == [set(installed.SUPPORTED), {first}, set(others)]
    pythons = {word.rpartition(" ")[2] for word in project["classifiers"] if "Python :: 3." in word}
    assert said["Python"][0] == pythons
    assert SpecifierSet(project["requires-python"]) == SpecifierSet(f">={min(pythons)}")
    assert broker in said["Apache Kafka"][1]
