"""Build the command line of spark-submit for a job. Pure, except for ``installed_spark``."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from spark_jobs.errors import JobError

_SECRET: Final = re.compile(r"(?i)passw|secret|token|jaas|credential|access[._-]?key|database_url")
# These contain the location of a secret, not the secret.
_REFERENCE: Final = re.compile(r"spark\.kubernetes\.(driver|executor)\.secret(s|KeyRef)\.|.*([Ff]ile|[Pp]ath)$")
_URL_WITH_PASSWORD: Final = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
_CORE_JAR: Final = re.compile(r"spark-core_\d+\.\d+-(.+)\.jar")


@dataclass(frozen=True, slots=True)
class Spark:
    """An installed Spark: its folder and its version."""

    home: Path
    version: str

    @property
    def program(self) -> Path:
        """``spark-submit``."""
        return self.home / "bin" / "spark-submit"


def installed_spark() -> Spark:
    """Return the Spark of $SPARK_HOME, or else that of the pyspark package. Raises JobError if it is not usable."""
    import pyspark

    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    home = Path(os.environ.get("SPARK_HOME") or Path(found.origin).parent)
    matches = [match for jar in (home / "jars").glob("spark-core_*.jar") if (match := _CORE_JAR.fullmatch(jar.name))]
    if len(matches) != 1 or not (home / "bin" / "spark-submit").is_file():
        raise JobError(f"{home} holds no Spark: no bin/spark-submit or no jars/spark-core; set or unset SPARK_HOME")
    version = matches[0][1]
    if version != pyspark.__version__:
        raise JobError(
            f"SPARK_HOME={home} is Spark {version}, but pyspark {pyspark.__version__} is installed here; install "
            f"pyspark=={version}, or unset SPARK_HOME"
        )
    return Spark(home, version)


@dataclass(frozen=True, slots=True)
class Submission:
    """One call of spark-submit.

    program, entry     spark-submit, and the Python file that the driver runs.
    zip                for --py-files.
    packages           Maven coordinates; jars are used instead when there are any.
    conf               Spark's properties.
    properties_file    a file with more of them, such as those that hold a secret.
    arguments          of the entry: a command line of ``outbox``.

    Raises JobError for an option that would show a secret to everyone who can list processes.
    """

    program: str
    entry: str
    zip: str
    name: str
    arguments: Sequence[str]
    master: str | None = None
    deploy_mode: str | None = None
    packages: str | None = None
    jars: Sequence[str] = ()
    conf: Mapping[str, str] = field(default_factory=dict)
    properties_file: str | None = None

    def __post_init__(self) -> None:
        for name, value in self.conf.items():
            if holds_secret(name, value):
                raise JobError(
                    f"--conf {name}: everybody on the machine can read a command line; put it into a file of your own "
                    "and give that as --properties-file"
                )
        for argument in self.arguments:
            if argument.startswith("--database-url") or _URL_WITH_PASSWORD.search(argument):
                raise JobError(
                    "--database-url: everybody on the machine can read a command line; set OUTBOX_DATABASE_URL, or "
                    "database_url in the file that OUTBOX_CONFIG names"
                )

    def lines(self) -> list[list[str]]:
        """Return the command line by line: the program, each option with its value, the entry with its arguments."""
        options = {
            "--master": self.master,
            "--deploy-mode": self.deploy_mode,
            "--name": self.name,
            "--properties-file": self.properties_file,
            "--jars": ",".join(self.jars) or None,
            "--packages": None if self.jars else self.packages or None,
            "--py-files": self.zip,
        }
        given = [[name, value] for name, value in options.items() if value is not None]
        conf = [["--conf", f"{name}={value}"] for name, value in sorted(self.conf.items())]
        return [[self.program], *given, *conf, [self.entry], list(self.arguments)]

    def command(self) -> list[str]:
        """Return the command as a list of arguments."""
        return [word for line in self.lines() for word in line]

    def shown(self) -> str:
        """Return the command for a shell, with one option per line."""
        return " \\\n  ".join(shlex.join(line) for line in self.lines())


def holds_secret(name: str, value: str) -> bool:
    """Return whether a Spark property looks like a secret."""
    if _URL_WITH_PASSWORD.search(value):
        return True
    return _SECRET.search(name) is not None and _REFERENCE.match(name) is None


def properties(pairs: Iterable[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` pairs. Raises JobError for any other form, and for a name that Spark would ignore."""
    read: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name.startswith("spark."):
            shown = name if separator else pair
            raise JobError(f"--conf {shown}: give spark.NAME=VALUE; Spark ignores properties of another name")
        read[name] = value
    return read
