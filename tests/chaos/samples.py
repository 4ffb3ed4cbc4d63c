"""What a soak samples: what processes and Postgres hold every few seconds, as JSON lines, and whether it stays flat.

A process that is killed starts again at zero. So each life of a process is compared with itself: the median of the last
third of its samples with that of the first, when it has warmed up; of backlogs, the lower quartiles. Of several lives
of a role the median growth counts, of those that were at least half as long as the longest. What Postgres holds has one
life.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import psutil
import psycopg
from threads import Threads

from chaos.faults import Relays
from chaos.members import Members
from chaos.reading import LiveReader
from chaos.recovery import STEADY


class Figure(NamedTuple):
    """What is sampled. ``slack``: so much more at the end is no growth, nor is a tenth of what there was."""

    unit: str
    slack: float


MEMORY, FILES, THREADS = "memory", "open files", "threads"
CONNECTIONS, DEAD_ROWS, SIZE = "connections", "dead rows", "size of tables"
SLOTS, WAL, JVM = "WAL kept by slots", "WAL on disk", "memory of Spark's JVM"
WAITING, OLDEST, UNAPPLIED = "events that wait", "age of the oldest event", "messages before a group"
FIGURES: Final = {
    # A relay that gets the lanes has more than one that waits for them, and a member that is behind reads ahead. In an
    # hour at 500 events a second 64 MB are 36 bytes an event: less than the smallest object.
    MEMORY: Figure("MB", 64),
    # A heap grows up to its limit.
    JVM: Figure("MB", 128),
    FILES: Figure("", 40),
    THREADS: Figure("", 24),
    CONNECTIONS: Figure("", 5),
    # As many as a few seconds leave until autovacuum comes.
    DEAD_ROWS: Figure("rows", 5_000),
    SIZE: Figure("MB", 16),
    SLOTS: Figure("MB", 64),
    # What checkpoints keep: max_wal_size.
    WAL: Figure("MB", 1_024),
    WAITING: Figure("", 1_000),
    OLDEST: Figure("s", 5),
    UNAPPLIED: Figure("", 2_000),
}
BACKLOGS: Final = {WAITING, OLDEST, UNAPPLIED}
"""What comes and goes with the load and with faults. It grows if it no longer gets low: its lower quartiles count."""
KEPT: Final = {
    "outbox.published",
    "outbox.audit",
    "consumer.processed_messages",
    "consumer.reservations",
    "consumer.dead_letters",
}
"""Tables that grow until what is in them is as old as it may get, or an operator discards it."""
_JVM: Final = "Spark's JVM"
_EVERY_SECONDS: Final = 5.0
WARM_UP_SECONDS: Final = 120.0
LEAST: Final = 60
"""Samples of a life, without those while it warms up, from which it is judged. A fault may last for some."""

_POSTGRES: Final = f"""
WITH tables AS (
    SELECT s.schemaname || '.' || coalesce(parent.relname, s.relname) AS name, s.n_dead_tup AS dead,
           pg_total_relation_size(s.relid) AS size
      FROM pg_stat_user_tables AS s
      LEFT JOIN pg_inherits AS i ON i.inhrelid = s.relid
      LEFT JOIN pg_class AS parent ON parent.oid = i.inhparent
     WHERE s.schemaname IN ('outbox', 'consumer')),
waiting AS (
    SELECT count(*) AS events, coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0) AS seconds
      FROM outbox.events WHERE aggregate_type IN ({", ".join(f"'{kind}'" for kind in STEADY)}))
SELECT '{CONNECTIONS}', split_part(application_name, ' ', 2), count(*)::float8
  FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox %' GROUP BY 2
UNION ALL SELECT '{DEAD_ROWS}', name, sum(dead)::float8 FROM tables GROUP BY name
UNION ALL SELECT '{SIZE}', name, sum(size)::float8 / 1e6 FROM tables GROUP BY name
UNION ALL SELECT '{SLOTS}', slot_name, pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::float8 / 1e6
  FROM pg_replication_slots WHERE restart_lsn IS NOT NULL
UNION ALL SELECT '{WAL}', 'pg_wal', sum(size)::float8 / 1e6 FROM pg_ls_waldir()
UNION ALL SELECT '{WAITING}', 'outbox', events::float8 FROM waiting
UNION ALL SELECT '{OLDEST}', 'outbox', seconds::float8 FROM waiting"""
_POSITIONS: Final = "SELECT grp, topic, part, next_offset FROM consumer.offsets"

Value = tuple[str, str, str, float]
"""A figure, whose it is, of which of its lives, and how much."""
Lives = Mapping[str, Sequence[tuple[float, float]]]
"""Seconds and values of each life."""
Series = Mapping[tuple[str, str], Lives]


class Sampler(Threads):
    """Adds a sample to a file every few seconds. Where Postgres is away, it has the processes only."""

    def __init__(self, file: Path, url: str, relays: Relays, members: Members, reader: LiveReader) -> None:
        self._file = file
        self._url = url
        self._relays = relays
        self._members = members
        self._reader = reader
        super().__init__({"sampler": self._run})

    def _run(self) -> None:
        started = time.monotonic()
        with self._file.open("a") as file:
            while not self._stop.wait(_EVERY_SECONDS):
                line = {"at": round(time.monotonic() - started, 1), "values": [*self._processes(), *self._postgres()]}
                file.write(json.dumps(line) + "\n")
                file.flush()

    def _processes(self) -> Iterator[Value]:
        for role, pid in [*(("relay", relay.pid) for relay in self._relays.present), *self._members.pids()]:
            try:
                process = psutil.Process(pid)
                yield from _held(role, process)
                if role == "spark":
                    for child in process.children():
                        yield from _held(_JVM, child)
            except psutil.Error:
                # It has ended, or its place is taken in this moment.
                continue

    def _postgres(self) -> Iterator[Value]:
        try:
            with psycopg.connect(self._url, connect_timeout=5) as connection:
                rows = connection.execute(_POSTGRES.encode()).fetchall()
                positions = connection.execute(_POSITIONS).fetchall()
        except psycopg.OperationalError:
            return
        for figure, name, value in rows:
            yield figure, name, "", round(value, 1)
        behind: Counter[str] = Counter()
        ends = self._reader.seen.ends()
        for group, topic, part, position in positions:
            behind[group] += max(ends.get((topic, part), 0) - position, 0)
        yield from ((UNAPPLIED, group, "", count) for group, count in behind.items())


def _held(role: str, process: psutil.Process) -> list[Value]:
    life = f"{process.pid} {process.create_time():.0f}"
    with process.oneshot():
        return [
            (JVM if role == _JVM else MEMORY, role, life, round(process.memory_info().rss / 1e6, 1)),
            (FILES, role, life, process.num_fds()),
            (THREADS, role, life, process.num_threads()),
        ]


def load(file: Path) -> Series:
    """Return the samples of a file, by figure and by whose it is."""
    series: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for line in file.read_text().splitlines():
        sample: dict[str, Any] = json.loads(line)
        for figure, name, life, value in sample["values"]:
            series.setdefault((figure, name), {}).setdefault(life, []).append((sample["at"], value))
    return series


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a figure: the medians over its lives of what was typical in their first and last thirds."""

    figure: str
    name: str
    verdict: str
    """``flat`` or ``grows``; ``kept`` of a table that keeps what is younger than a limit; ``too short``."""
    lives: int = 0
    first: float = 0.0
    last: float = 0.0
    growth: float = 0.0


def _lower_quartile(values: Sequence[float]) -> float:
    return quantiles(values, n=4)[0]


def judge(series: Series) -> list[Finding]:
    """Return what became of each figure, in the order of FIGURES."""
    found = [_judge(figure, name, lives) for (figure, name), lives in sorted(series.items())]
    return sorted(found, key=lambda each: list(FIGURES).index(each.figure))


def _judge(figure: str, name: str, lives: Lives) -> Finding:
    warm = [[value for at, value in life if at >= life[0][0] + WARM_UP_SECONDS] for life in lives.values()]
    least = max(LEAST, max(map(len, warm)) / 2)
    typical = _lower_quartile if figure in BACKLOGS else median
    thirds = [
        (typical(each[: len(each) // 3]), typical(each[-(len(each) // 3) :])) for each in warm if len(each) >= least
    ]
    if not thirds:
        return Finding(figure, name, "too short")
    first, last = (median(each[side] for each in thirds) for side in (0, 1))
    growth = median(after - before for before, after in thirds)
    if figure == SIZE and name in KEPT:
        verdict = "kept"
    else:
        verdict = "grows" if growth > max(FIGURES[figure].slack, first / 10) else "flat"
    return Finding(figure, name, verdict, len(thirds), round(first, 1), round(last, 1), round(growth, 1))
