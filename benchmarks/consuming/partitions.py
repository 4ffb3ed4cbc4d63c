"""Very many partitions: what a consumer holds while it works through them, and how many sessions it has."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import psycopg

from benchmarks.harness.measure import children, status_of
from benchmarks.harness.servers import BenchError
from outbox.sandbox.errors import tail
from spark_jobs.effects.mapped import Insert
from spark_jobs.job import ConsumerJob

CORES: Final = 2
"""Of local[2,4], which the job runs in."""
_EVERY: Final = 0.5
_ROOT: Final = Path(__file__).parents[2]
_NOTE: Final = "the quick brown fox " * 4
_SETUP: Final = "CREATE TABLE IF NOT EXISTS wide (n bigint, account text, note text)"
_SCHEMA: Final = "n bigint, account string, note string"

plain: Final = ConsumerJob("partitions", ["partitions"], Insert("wide"), schema=_SCHEMA, setup=_SETUP)


def _upper(rows: Any) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    return rows.withColumn("account", F.upper("account"))


transform: Final = ConsumerJob(
    "partitions", ["partitions"], Insert("wide"), schema=_SCHEMA, setup=_SETUP, transform=_upper
)


@dataclass(frozen=True)
class Job:
    """A job of this module, by its name."""

    name: str
    about: str


JOBS: Final = (
    Job("plain", "our consumer with Insert"),
    Job("transform", "the same with a transform that computes a column"),
)


def event(number: int) -> tuple[str, Mapping[str, object]]:
    """Return an event of about 120 bytes."""
    account = f"account-{number % 100_000}"
    return account, {"n": number, "account": account, "note": _NOTE}


@dataclass
class Sampled:
    """What was seen of a run, twice a second: MB by role, sessions by name, and how far it was."""

    memory: list[dict[str, float]] = field(default_factory=list)
    sessions: list[dict[str, int]] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)

    def working(self) -> slice:
        """Return which samples are of the work: after the first round, until the last."""
        last = self.applied[-1]
        found = [number for number, applied in enumerate(self.applied) if 0 < applied < last]
        if len(found) < 8:
            raise BenchError(f"only {len(found)} samples while it worked: take more events")
        return slice(found[0], found[-1] + 1)


class Sampler(threading.Thread):
    """Samples a consumer's processes and sessions until ``end``."""

    def __init__(self, pid: int, url: str) -> None:
        super().__init__(name="sampler", daemon=True)
        self._pid = pid
        self._url = url
        self._over = threading.Event()
        self.sampled = Sampled()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with psycopg.connect(self._url, autocommit=True, application_name="sampler") as connection:
                while not self._over.wait(_EVERY):
                    sessions = connection.execute(
                        "SELECT application_name, count(*) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND application_name LIKE 'outbox %' GROUP BY 1"
                    ).fetchall()
                    applied = connection.execute("SELECT coalesce(sum(next_offset), 0) FROM consumer.offsets")
                    row = applied.fetchone()
                    assert row is not None
                    self.sampled.memory.append(by_role(self._pid))
                    self.sampled.sessions.append({str(name): int(count) for name, count in sessions})
                    self.sampled.applied.append(int(row[0]))
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self.error = error

    def end(self) -> Sampled:
        """Stop; return what was seen. Raises what ended it before."""
        self._over.set()
        self.join()
        if self.error is not None:
            raise self.error
        return self.sampled


def by_role(pid: int) -> dict[str, float]:
    """Return the resident MB of a driver: its Python, its JVM, and the JVM's Python workers together."""
    found = dict.fromkeys(("driver, Python", "driver, JVM", "Python workers"), 0.0)
    below = [(pid, "driver, Python")]
    for one, role in below:
        found[role] += status_of(str(one), "VmRSS:") / 1024
        beneath = "driver, Python" if role == "driver, Python" else "Python workers"
        below += [(child, "driver, JVM" if _is_java(child) else beneath) for child in children(one)]
    return found


def _is_java(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "java"
    return False


def consume(url: str, kafka: str, topic: str, folder: Path, job: str) -> tuple[dict[str, Any], Sampled]:
    """Run ``outbox consume`` over the topic, as a process. Returns its figures and what was seen of it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")} | {
        "OUTBOX_DATABASE_URL": url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": kafka,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    spec = f"benchmarks.consuming.partitions:{job}"
    out, log = folder / "consume.json", folder / "consume.log"
    with out.open("wb") as figures, log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "relay.cli", "consume", spec, "--topic", topic, "--once", "--json"],
            env=environment,
            cwd=folder,
            stdout=figures,
            stderr=errors,
        )
    sampler = Sampler(process.pid, url)
    sampler.start()
    try:
        status = process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
    sampled = sampler.end()
    if status:
        raise BenchError(f"outbox consume ended with {status}\n{tail(log)}")
    line = next(one for one in out.read_text().splitlines() if one.startswith("{"))
    return orjson.loads(line), sampled


def quarters(sampled: Sampled) -> dict[str, list[tuple[float, float, float]]]:
    """Return least, median and greatest of each role's memory, for each quarter of the work."""
    working = sampled.working()
    memory = sampled.memory[working]
    found: dict[str, list[tuple[float, float, float]]] = {}
    for role in memory[0]:
        values = [one[role] for one in memory]
        bounds = [len(values) * part // 4 for part in range(5)]
        parts = [values[low:high] for low, high in itertools.pairwise(bounds)]
        found[role] = [(min(part), statistics.median(part), max(part)) for part in parts]
    return found


def most_sessions(sampled: Sampled) -> dict[str, int]:
    """Return the most sessions at a time, by name and in all."""
    found = {"all": max(sum(one.values()) for one in sampled.sessions)}
    for one in sampled.sessions:
        for name, count in one.items():
            found[name] = max(found.get(name, 0), count)
    return found


def grown(spread: Sequence[tuple[float, float, float]]) -> float:
    """Return by how much the last quarter's median is above the second's; the first one still warms up.

    0 for a role that had no process in the second: there is nothing to compare with.
    """
    return spread[3][1] / spread[1][1] - 1 if spread[1][1] else 0.0
