"""What relays have recorded (protocol_trace.py), compared by TLC with the specification of their protocol.

A lane is checked by itself: docs/explanation/protocol/trace.tla. A failure names the first step that does not fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tlc

Line = dict[str, Any]
Place = tuple[str, int]
"""A topic and a partition."""

_LISTS: Final = frozenset({"ids", "keys", "event_ids"})

_CONFIG: Final = """CONSTANTS
  Delivery = "{delivery}"
  Relays <- Recorders
  None = None
  Keys <- KeysSeen
  Lanes = {{1}}
  BatchSize = {batch_size}
  Producers = {producers}
  Kinds = {{"crash", "expire", "kafka", "release", "lost", "delayed", "close"}}
  Faults = 1000
  Refusals = 0
  Wrong = "nothing"
CHECK_DEADLOCK FALSE
INIT TraceInit
NEXT TraceNext
VIEW Without_left
CONSTRAINT Fits
INVARIANTS {promises} NotExplained
"""
_PROMISES: Final = "OrderOfAKey NoLoss OneMaySettle NothingLeftBehind"
# TLC breaks what is long into lines.
_FITS: Final = re.compile(r'<<\s*"fits",\s*(\d+),\s*\[(.*?)\],\s*<<(.*?)>>\s*>>', re.DOTALL)


class NotExplained(AssertionError):
    """The specification allows no such behaviour. ``step`` is the first that does not fit, if it is one."""

    def __init__(self, text: str, step: Line | None) -> None:
        super().__init__(text)
        self.step = step


def load(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def lanes(lines: Iterable[Line]) -> list[int]:
    """Return the lanes of which something was read."""
    return sorted({line["lane"] for line in lines if line["step"] == "read"})


def events(lines: Iterable[Line], lane: int) -> int:
    """Return how many events of the lane were read."""
    return len({row for line in lines if line["step"] == "read" and line["lane"] == lane for row in line["ids"]})


def partitions(lines: Sequence[Line], lane: int, places: Mapping[str, Place]) -> dict[Place, list[Line]]:
    """Return the lane's steps with the events of each partition. ``places``: where Kafka has an event.

    At-least-once, partitions acknowledge on their own, so what is acknowledged of a lane's batch need not be its begin.
    Of a partition it is: each has a behaviour of its own.
    """
    reads = [line for line in lines if line["step"] == "read" and line["lane"] == lane]
    rows = {row: places[event] for line in reads for row, event in zip(line["ids"], line["event_ids"], strict=True)}
    own = [line for line in lines if line.get("lane", lane) == lane]
    return {place: list(_of_rows(own, {row for row in rows if rows[row] == place})) for place in set(rows.values())}


def _of_rows(lines: Iterable[Line], rows: Collection[int]) -> Iterator[Line]:
    """Leave out the other rows, and turns that have none of these."""
    turn: set[str] = set()
    for line in lines:
        if "ids" not in line:
            yield line
            continue
        kept = [number for number, row in enumerate(line["ids"]) if row in rows]
        if line["step"] == "read":
            (turn.add if kept else turn.discard)(line["relay"])
        if kept or (line["step"] == "failed" and line["relay"] in turn):
            lists = {name: [line[name][number] for number in kept] for name in _LISTS & line.keys()}
            yield line | lists


def check(lines: Sequence[Line], lane: int, seen: Iterable[str]) -> int:
    """Check the steps of a lane. ``seen``: the event ids on Kafka, each key's in order. Returns their number."""
    [(transactional, batch_size)] = {(x["transactional"], x["batch_size"]) for x in lines if x["step"] == "began"}
    steps = _of_lane(lines, lane)
    read = [line for each in steps.values() for line in each if line["step"] == "read"]
    keys = {row: key for line in read for row, key in zip(line["ids"], line["keys"], strict=True)}
    rows = {event: row for line in read for event, row in zip(line["event_ids"], line["ids"], strict=True)}
    numbers = {row: number for number, row in enumerate(sorted(keys), 1)}
    names = [f"r{number}" for number in range(1, len(steps) + 1)]
    module = [
        "---- MODULE steps ----",
        "EXTENDS Naturals, Sequences, TLC",
        f"Recorders == {_set(names)}",
        f"KeysSeen == {_sequence(keys[row] for row in sorted(keys))}",
        f"Seen == {_tuple(numbers[rows[event]] for event in seen if event in rows)}",
        f"All == {sum(map(len, steps.values()))}",
        "Steps == [",
        ",\n".join(f"{name} |-> {_steps(steps, each, numbers)}" for name, each in zip(names, steps, strict=True)),
        "]",
        "====",
    ]
    config = _CONFIG.format(
        delivery="exactly-once" if transactional else "at-least-once",
        batch_size=batch_size,
        producers=2 if transactional else 1,
        promises=f"{_PROMISES} {'NoDouble NeverBlind NamedInTheRow' if transactional else 'OnlyWhatWasInFlightTwice'}",
    )
    checked = tlc.run("trace.tla", config, steps="\n".join(module))
    if checked.broken == "NotExplained":
        return sum(map(len, steps.values()))
    if checked.broken or checked.states is None:
        raise NotExplained(f"lane {lane}: {checked}", None)
    raise _why_not(checked.output, steps, lane)


def _of_lane(lines: Sequence[Line], lane: int) -> dict[str, list[Line]]:
    """Return each process's steps with the lane, and what became of the process."""
    steps: dict[str, list[Line]] = {}
    gone: set[str] = set()
    first: int | None = None
    before = min(line["epoch"] for line in lines if line.get("lane") == lane and "epoch" in line) - 1
    for line in lines:
        if line.get("lane", lane) != lane or line["step"] == "began":
            continue
        own, step = steps.setdefault(line["relay"], []), line["step"]
        if step == "confirmed" and not _under_way(own):
            # Of a turn without events of this lane.
            continue
        if step == "taken":
            gone.discard(line["relay"])
        elif step == "let_go":
            gone.add(line["relay"])
        if step == "joined":
            # The first marker of a lane may have any number.
            first = line["batch"] if first is None else first
        batch = line["batch"] - (first or 0) if "batch" in line else 0
        epoch = line["epoch"] - before if "epoch" in line else 0
        own.append({**line, "batch": batch, "epoch": epoch, "gone": line["relay"] in gone})
    for own in steps.values():
        if own[-1]["step"] != "closed":
            own.append({**own[-1], "step": "killed", "ids": [], "since": own[-1]["at"]})
    own_steps = {relay: own for relay, own in steps.items() if any("lane" in line for line in own)}
    taken = [line for own in own_steps.values() for line in own if line["step"] == "taken"]
    for epoch in sorted({*range(1, max(line["epoch"] for line in taken))} - {line["epoch"] for line in taken}):
        # Whoever took the lane under it was gone before its worker knew of that: it has done nothing else.
        own_steps[f"unseen {epoch}"] = [{**taken[0], "epoch": epoch, "at": lines[-1]["at"], "since": lines[0]["since"]}]
    return own_steps


def _under_way(own: Sequence[Line]) -> bool:
    """Return whether a turn of the lane is not confirmed yet; the turn before may be settled meanwhile."""
    last = next((line["step"] for line in reversed(own) if line["step"] != "settled"), None)
    return last in {"read", "sent"}


def _steps(steps: Mapping[str, Sequence[Line]], relay: str, numbers: Mapping[int, int]) -> str:
    def record(line: Line) -> str:
        after = ", ".join(
            f"r{number} |-> {sum(each['at'] <= line['since'] for each in own) if other != relay else 0}"
            for number, (other, own) in enumerate(steps.items(), 1)
        )
        events = _tuple(numbers[row] for row in line.get("ids", ()))
        return (
            f'[step |-> "{line["step"]}", epoch |-> {line["epoch"]}, batch |-> {line["batch"]}, '
            f"events |-> {events}, gone |-> {str(line['gone']).upper()}, after |-> [{after}]]"
        )

    return "<<" + ",\n  ".join(map(record, steps[relay])) + ">>"


def _why_not(output: str, steps: Mapping[str, Sequence[Line]], lane: int) -> NotExplained:
    """Name the steps after the longest prefix that fits, the earliest first."""
    found = [
        (int(count), tuple(map(int, re.findall(r"> (\d+)", done))), log) for count, done, log in _FITS.findall(output)
    ]
    count = max((each[0] for each in found), default=0)
    following: dict[int, Line] = {}
    for _, done, _ in (each for each in found if each[0] == count):
        for own, number in zip(steps.values(), done, strict=True):
            if number < len(own):
                following[own[number]["at"]] = own[number]
    total = sum(map(len, steps.values()))
    if not following:
        logs = sorted({log for number, _, log in found if number == count})
        return NotExplained(f"lane {lane}: Kafka does not have what the steps say, but: {logs}", None)
    step = following[min(following)]
    return NotExplained(f"lane {lane}: {count} of {total} steps fit the specification; then does not: {step}", step)


def _sequence(texts: Iterable[str]) -> str:
    return _tuple(json.dumps(text) for text in texts)


def _tuple(values: Iterable[Any]) -> str:
    return f"<<{', '.join(map(str, values))}>>"


def _set(texts: Iterable[str]) -> str:
    return "{" + ", ".join(map(json.dumps, texts)) + "}"
