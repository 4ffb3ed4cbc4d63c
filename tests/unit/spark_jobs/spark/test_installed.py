"""Which pysparks a consumer runs with."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pyspark
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from outbox.errors import ConfigurationError
from outbox.sandbox import jars
from outbox.sandbox.versions import KAFKA_VERSIONS
from relay.cli.app import app
from spark_jobs.spark import installed

ROOT = Path(__file__).parents[4]
COMMAND = ["consume", "spark_jobs.order_totals:job", "--once"]


def pinned(lock: str) -> str:
    """Return the version of pyspark in a lock file."""
    [version] = re.findall(r"^pyspark==(\S+) ", (ROOT / lock).read_text(), re.MULTILINE)
    return version


@pytest.mark.parametrize(
    ("version", "minor"), [("4.1.0", "4.1"), ("4.1.4", "4.1"), ("4.2.0", "4.2"), ("4.2.7.dev1", "4.2")]
)
def test_a_pyspark_that_was_tested_is_taken_without_a_word(monkeypatch, caplog, version, minor):
    monkeypatch.setattr(installed, "pyspark_version", lambda: version)
    installed.require_installed()
    assert not caplog.records
    assert minor in installed.SUPPORTED


@pytest.mark.parametrize("version", ["2.4.8", "4.0.5", "3.10.0"])
def test_an_older_pyspark_is_an_error(monkeypatch, version):
    monkeypatch.setattr(installed, "pyspark_version", lambda: version)
    with pytest.raises(ConfigurationError, match=rf"pyspark {re.escape(version)} is installed.*'pyspark>=4\.1,<4\.3'"):
        installed.require_installed()
    done = CliRunner().invoke(app, COMMAND)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"pyspark {version} is installed, which the consumer does not support" in done.stderr


@pytest.mark.parametrize("version", ["4.3.0", "4.10.1", "5.0.0.dev1"])
def test_a_newer_pyspark_is_a_warning(monkeypatch, caplog, version):
    monkeypatch.setattr(installed, "pyspark_version", lambda: version)
    with caplog.at_level(logging.WARNING):
        installed.require_installed()
    assert caplog.messages == [f"pyspark {version} is newer than what the consumer is tested with (4.1, 4.2)"]


def test_a_version_that_can_not_be_read_is_an_error(monkeypatch):
    monkeypatch.setattr(installed, "pyspark_version", lambda: "unknown")
    with pytest.raises(ConfigurationError, match="'unknown', which can't be read"):
        installed.require_installed()


@pytest.mark.parametrize("zipped", [False, True])
def test_the_version_is_that_of_the_pyspark_on_the_path_which_is_not_imported(tmp_path, zipped):
    """spark-submit gives the driver a zip, and another pyspark may be installed beside it."""
    place = tmp_path / "pyspark.zip"
    with ZipFile(place, "w") as made:
        made.writestr("pyspark/__init__.py", "raise AssertionError('imported')")
        made.writestr("pyspark/version.py", "# …\n__version__: str = '4.1.9'\n")
    if not zipped:
        with ZipFile(place) as made:
            made.extractall(place := tmp_path / "folder")
    code = "from spark_jobs.spark import installed; print(installed.pyspark_version())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "4.1.9\n"
    assert installed.pyspark_version() == pyspark.__version__


def test_each_supported_pyspark_has_its_tests():
    """What has to change together when a version is added or dropped."""
    supported = installed.SUPPORTED
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
    assert {broker} | said["Apache Kafka"][2] == set(KAFKA_VERSIONS)
