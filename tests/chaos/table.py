"""The table of runs: JSON lines, and docs/explanation/chaos.md, which is written from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

_HEAD: Final = """\
# Chaos

What `make chaos` found: a load of business transactions, three relays, and everything else killed, halted and cut off
at random. The course of a run (what is struck when, what each transaction holds) follows from its seed; the seed and
the configuration repeat it. The checker (`tests/chaos/checker.py`) compares what stands on the topics with what is
committed, in the terms of Jepsen's Kafka workload; it is tested on histories with each anomaly.

- Load: 100,000 keys and a hot one with a fifth of the events; payloads of 1 byte to 990 kB; transactions of 1 to 300
  events, some rolled back, some with savepoints, half of them committed asynchronously (a crash of Postgres loses the
  last of these), some committed long after others with higher ids; 4 or 256 lanes; a topic that is created in the
  course and two that refuse some events, which must end as dead letters. With the WAL as the source, events are rows
  too, and no messages.
- Faults: relays killed, stopped, halted, and started with failpoints armed; brokers and Postgres killed and halted; cut
  connections, black holes and lost, late and doubled requests between relays and Postgres and, with one broker, Kafka;
  with seeds 3, 8, …, a synchronous standby is promoted. With three brokers: three replicas, two in sync.
- Operators, in the runs that name them: between the faults dead letters are discarded and retried, a topic that refuses
  events is mended for a while, lanes, topics and everything are paused, drained and resumed, the archive is replayed,
  topics get more partitions, the source is switched and the delivery changed, by the commands of the command line. Six
  keys are poisoned again and again while they are written. A third of the run is calm: keys wait behind dead letters
  until operators free them. "In vain": there was nothing to do, or it was not done in time. The delivery and the source
  in the table are those of the beginning.
- What operators do changes what may be expected, and no more than that: a discarded event is on no topic; a replay
  repeats what its audit says; a key is in the partitions that it had under the topic's numbers of partitions, in each
  of them in order; an event that first appeared under exactly-once is never repeated, whatever the delivery is later.
- Anomalies: lost, duplicated, aborted, reordered, in a wrong partition, corrupted, misrouted, invented, unstable, wrong
  dead letters, stuck.
- Repeats are at-least-once's, each explained by a fault. Exactly-once has none: one would be an anomaly.
- Recovery: seconds from the healing of a fault (the process is started again, the network heals) until an event is read
  that was committed after it; caught up: until everything that was in the outbox at the healing is published. Whatever
  is struck meanwhile is part of the time. Median and maximum over the faults of a run. Drained: what the last relays
  took, after the end, for all that was left. Each event that a broker refuses costs a part of that.
"""

_COLUMNS: Final = (
    ("date", lambda row: row["date"][:16].replace("T", " ")),
    ("commit", lambda row: row["commit"]),
    ("seed", lambda row: row["seed"]),
    ("source", lambda row: row["source"]),
    ("delivery", lambda row: row["delivery"]),
    ("brokers", lambda row: row["brokers"]),
    ("lanes", lambda row: row["lanes"]),
    ("s", lambda row: f"{row['seconds']:g}"),
    ("events", lambda row: f"{row['events']:,}"),
    ("MB", lambda row: f"{row['bytes'] / 1e6:,.0f}"),
    ("rolled back / unknown", lambda row: f"{row['rolled_back']} / {row['unknown']}"),
    ("dead / behind them", lambda row: f"{row['dead']} / {row['blocked']}"),
    ("faults", lambda row: ", ".join(f"{name} {count}" for name, count in row["faults"].items())),
    ("operators", lambda row: ", ".join(f"{name} {n}" for name, n in row.get("operators", {}).items()) or "none"),
    ("repeats", lambda row: row["repeats"]),
    ("recovery p50 / max", lambda row: f"{row['recovery_p50']} / {row['recovery_max']} s"),
    ("caught up p50 / max", lambda row: f"{row['catch_up_p50']} / {row['catch_up_max']} s"),
    ("drained in", lambda row: f"{row['drain_seconds']} s"),
    ("anomalies", lambda row: ", ".join(f"**{name} {n}**" for name, n in row["anomalies"].items()) or "none"),
)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a run to the file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write(rows: Path, page: Path) -> None:
    """Write the page anew from all runs of the file."""
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    page.write_text(_HEAD + "\n" + summary(found) + "\n\n" + "\n".join(_lines(found)) + "\n")


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return one paragraph about all runs."""
    found = list(rows)
    medians = sorted(row["recovery_p50"] for row in found if row["recovery_p50"] is not None)
    longest = max((row["recovery_max"] for row in found if row["recovery_max"] is not None), default=None)
    return (
        f"{len(found)} runs, {sum(row['events'] for row in found):,} committed events, "
        f"{sum(sum(row['faults'].values()) for row in found):,} faults, "
        f"{sum(sum(row['anomalies'].values()) for row in found):,} anomalies; "
        f"recovery: median of the medians {medians[len(medians) // 2] if medians else None} s, longest {longest} s."
    )


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    yield "| " + " | ".join(name for name, _ in _COLUMNS) + " |"
    yield "|" + "---|" * len(_COLUMNS)
    for row in rows:
        yield "| " + " | ".join(str(value(row)) for _, value in _COLUMNS) + " |"
