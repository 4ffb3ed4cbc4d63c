"""The runs: JSON lines, and docs/explanation/chaos.md, which sums them up by configuration, and the last soak."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "explanation" / "chaos.md"
ROWS: Final = PAGE.with_name("chaos.jsonl")
_CODE: Final = ("outbox", "relay", "spark_jobs", "migrations", "tests", "requirements.lock")

_HEAD: Final = """\
# Chaos

`make chaos` runs business transactions, three relays and six consumers, and kills, halts and disconnects everything at
random; a seed repeats a run. The checker (`tests/chaos/checker.py`) compares what was committed with the topics and
with the effects, in the terms of Jepsen's Kafka workload.

- Load: 100,000 keys, and a hot one with a fifth of the events; payloads of 1 byte to 990 kB; transactions of 1 to 300
  events, some rolled back, committed late or asynchronously; 4, 64 or 256 lanes; a topic that is created during the
  run, and two that refuse some events. 200 events a second, or 100 with three brokers, all on two processors.
- Faults: processes killed, stopped and halted, also at failpoints; brokers and Postgres killed and halted; connections
  cut, packets dropped, requests lost, late and doubled; in some runs a synchronous standby is promoted. Three brokers
  have three replicas, two in sync. Servers keep their files in memory.
- Operators: commands discard and retry dead letters, pause, replay, add partitions, change source, delivery and lanes;
  in some runs records are deleted from Kafka. The table names the first source and delivery.
- Consumers: two members each of an inbox group (or Spark's `outbox consume --continuous`), of a transformer, and of
  callers of a payment provider, which refuses some calls and loses some answers.
- Strangers write into the same topics: names and ids that are none, 1 MB, deep JSON, tombstones, times of any year, in
  transactions that are aborted or left behind.
- Each group must have the effect of each event once, in order, and as dead letters what it can't apply; `outbox audit`
  must find what the checker finds. Anything else is an anomaly.
- Repeats and losses: under at-least-once and at-most-once, faults must explain each.
- Recovery: seconds from the end of a fault until an event is read that was committed after it, whatever strikes
  meanwhile. Applied: until the effect of such an event is there, after a fault of a consumer. Both without the seconds
  in which Postgres or the only broker is struck, or operators stop everything; after a change of lanes, to the next
  event. Caught up: until all is published that was in the outbox at a fault's end, whatever happens meanwhile.
- In time: runs whose recovery took at most 2 s in the median, and 15 s at most.

Each run is a line of `docs/explanation/chaos.jsonl`. Times are the median of the runs' medians, and the longest.
"""

_SOAK: Final = """
## Soak

`make soak`: {minutes:g} minutes, {source}, {delivery}; {rate:g} events a second, of which some are rolled back, and a
fault each minute. {events:,} committed events, {struck} faults, {anomalies} anomalies; recovery {recovery_p50:g} s in
the median, {recovery_max:g} s at most. A process that is killed starts again: each is compared with itself, the last
third of its samples with the first, by their medians; of backlogs, which come and go, by their lower quartiles.

![Memory, files, connections, rows and WAL over time](soak.svg)

| figure | of | grew most | from | to | verdict |
|---|---|---|---|---|---|
"""

_CONFIGURATION: Final = ("source", "delivery", "brokers")
_TIMES: Final = {"recovery": "recovery", "caught up": "catch_up"}
_MEDIAN_SECONDS: Final = 2.0
_LONGEST_SECONDS: Final = 15.0


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a run to the file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def commit() -> str:
    """Return the commit that is tested, with a mark where code differs from it; the rows themselves do not count."""
    hash_ = _git("rev-parse", "--short", "HEAD")
    if not hash_:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *_CODE)
    return f"{hash_}+" if changed else hash_


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def write(rows: Path, page: Path) -> None:
    """Write the page anew from all runs of the file, and from the soak beside it."""
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    soak = page.with_name("soak.json")
    shown = "".join(_soak(json.loads(soak.read_text()))) if soak.exists() else ""
    page.write_text(_HEAD + "\n" + summary(found) + "\n\n" + "\n".join(_lines(found)) + "\n" + shown)


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return one paragraph about all runs."""
    found = list(rows)
    return (
        f"{len(found)} runs, {sum(row['events'] for row in found):,} committed events, "
        f"{sum(sum(row['faults'].values()) for row in found):,} faults, "
        f"{sum(sum(row['anomalies'].values()) for row in found):,} anomalies; "
        f"recovery (median, longest): {_seconds(found, 'recovery')} s, in time in {_in_time(found)} runs."
    )


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    by_configuration: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_configuration[tuple(row[name] for name in _CONFIGURATION)].append(row)
    counts = ("runs", "events", "faults", "repeats", "lost")
    columns = (*_CONFIGURATION, *counts, *_TIMES, "applied", "by Spark", "in time", "anomalies")
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for configuration, runs in sorted(by_configuration.items()):
        anomalies = sum(sum(row["anomalies"].values()) for row in runs)
        by_spark = [row for row in runs if row.get("consumers") == "spark"]
        shown = (
            *configuration,
            len(runs),
            f"{sum(row['events'] for row in runs):,}",
            sum(sum(row["faults"].values()) for row in runs),
            f"{sum(row['repeats'] for row in runs):,}",
            f"{sum(row.get('lost', 0) for row in runs):,}",
            *(_seconds(runs, figure) for figure in _TIMES.values()),
            _seconds([row for row in runs if row not in by_spark], "effect"),
            _seconds(by_spark, "effect"),
            _in_time(runs),
            f"**{anomalies}**" if anomalies else "none",
        )
        yield "| " + " | ".join(map(str, shown)) + " |"


def _seconds(rows: Sequence[Mapping[str, Any]], figure: str) -> str:
    """Return the median of the runs' medians and the longest time."""
    medians = [row[f"{figure}_p50"] for row in rows if row.get(f"{figure}_p50") is not None]
    longest = [row[f"{figure}_max"] for row in rows if row.get(f"{figure}_max") is not None]
    return f"{median(medians):.1f}, {max(longest):.1f}" if medians else "not measured"


def _in_time(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many of the runs in which the recovery was measured were as quick as they should be."""
    times = [(row["recovery_p50"], row["recovery_max"]) for row in rows if row["recovery_p50"] is not None]
    quick = sum(middle <= _MEDIAN_SECONDS and longest <= _LONGEST_SECONDS for middle, longest in times)
    return f"{quick} of {len(times)}"


def _soak(row: Mapping[str, Any]) -> Iterable[str]:
    """Return the section of a soak, with one line for each figure: what has grown most of it."""
    counts = {"minutes": row["seconds"] / 60, "struck": len(row["struck"]), "anomalies": sum(row["anomalies"].values())}
    yield _SOAK.format(**{**row, **counts})
    figures: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for each in row["findings"]:
        if each["verdict"] in {"flat", "grows"}:
            figures[each["figure"]].append(each)
    for figure, found in figures.items():
        most = max(found, key=lambda each: (each["verdict"] == "grows", each["growth"]))
        grown = ", ".join(each["name"] for each in found if each["verdict"] == "grows")
        verdict = f"**grows**: {grown}" if grown else "flat"
        shown = (figure, len(found), most["name"], f"{most['first']:,g}", f"{most['last']:,g}", verdict)
        yield "| " + " | ".join(map(str, shown)) + " |\n"
