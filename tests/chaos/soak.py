"""The command behind `make soak`: one long run at a steady rate, a fault each minute; nothing may grow.

    make soak                                              90 minutes, 500 events a second, the WAL, exactly-once;
                                                           on a machine that does nothing else
    make soak ARGS="--minutes 30 --seed 2 --source polling"
    make soak ARGS="--show"                                print the course, run nothing
    make soak ARGS="--report build/soak/… --publish"       judge the samples of a run again, and put it into the docs

It is a run of `make chaos` whose faults are drawn one a minute from all of them, without failpoints, while an operator
discards the dead letters each minute. In the end everything is drained, checked and audited as there: that takes 1 kB
of memory an event. The exit status is 1 when the run had an anomaly, or a figure grows.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import math
import shutil
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from chaos import table
from chaos.course import (
    MEMBER_FAULTS,
    RELAY_FAULTS,
    RELAYS,
    SERVER_FAULTS,
    Act,
    Configuration,
    Course,
    chance_of,
    track,
)
from chaos.faults import Relays
from chaos.members import Members
from chaos.plot import plot
from chaos.reading import LiveReader
from chaos.run import run
from chaos.samples import Sampler, judge, load
from chaos.stage import KafkaSite, Stage

_MINUTE: Final = 60.0
_LONGEST: Final = 100.0
"""Minutes. The audit of a run looks two hours back."""
_FASTEST: Final = 550.0
"""Events a second: the times in event ids go on as fast, see EventIds."""
_OUT: Final = table.ROOT / "build" / "soak"
_TOPIC_SECONDS: Final = 10.0
_DISCARDED: Final = 1_000


def soak_course(seed: int, configuration: Configuration) -> Course:
    """Return the course of a seed: each minute a fault, and half a minute later the dead letters are discarded."""
    minutes = [_MINUTE * number for number in range(1, math.ceil(configuration.seconds / _MINUTE))]
    drawn = track(
        chance_of(seed, configuration, "soak"),
        math.inf,
        RELAY_FAULTS | MEMBER_FAULTS | SERVER_FAULTS,
        configuration,
        first=0.0,
        pause=(0.0, 0.0),
    )
    faults = [replace(fault, at=at) for at, fault in zip(minutes, drawn, strict=False)]
    return Course(
        seed,
        configuration,
        lanes=256 if seed % 2 else 4,
        standby=False,
        last_relays=RELAYS,
        topic_created_at=_TOPIC_SECONDS,
        faults=tuple(fault for fault in faults if fault.name not in MEMBER_FAULTS),
        failpoints=(),
        acts=tuple(Act(at - _MINUTE / 2, "discard", times=_DISCARDED) for at in minutes),
        member_faults=tuple(fault for fault in faults if fault.name in MEMBER_FAULTS),
    )


def main(words: Sequence[str]) -> int:
    """Run what the arguments choose, or report on a run that there was."""
    given = _arguments(words)
    if given.report is not None:
        return _report(given.report, publish=given.publish)
    configuration = Configuration(
        given.source,
        given.delivery,
        given.brokers,
        given.minutes * _MINUTE,
        operators=False,
        consumers=given.consumers,
        rate=given.rate,
    )
    course = soak_course(given.seed, configuration)
    if given.show:
        print(course)
        return 0
    date = dt.datetime.now(dt.UTC)
    folder = _OUT / f"{date:%Y%m%d-%H%M%S}-seed-{course.seed}"
    folder.mkdir(parents=True)
    struck = sorted(fault.at for fault in (*course.faults, *course.member_faults))
    known = {"date": date.isoformat(timespec="seconds"), "commit": table.commit(), "rate": given.rate, "struck": struck}
    known["seconds"] = configuration.seconds
    _keep(folder, known)
    try:
        _keep(folder, known | _carry_out(course, folder))
    except Exception:  # noqa: BLE001 - what was sampled is shown, whatever ended it
        traceback.print_exc()
    return _report(folder, publish=given.publish)


def _carry_out(course: Course, folder: Path) -> dict[str, Any]:
    @contextmanager
    def sampled(stage: Stage, relays: Relays, members: Members, reader: LiveReader) -> Iterator[None]:
        with Sampler(folder / "samples.jsonl", stage.url, relays, members, reader) as sampler:
            yield
            sampler.stop()

    with KafkaSite(course.configuration.brokers) as site:
        # A figure may need the logs to be explained.
        say = functools.partial(print, flush=True)
        result = run(course, site, folder / "logs", say, observer=sampled, keep=True)
    print(result.verdict, *result.standing, sep="\n", flush=True)
    return result.as_json()


def _keep(folder: Path, known: dict[str, Any]) -> None:
    (folder / "run.json").write_text(json.dumps(known) + "\n")


def _report(folder: Path, *, publish: bool) -> int:
    """Judge the samples of a run and draw them; with ``publish`` also for the documentation."""
    known = json.loads((folder / "run.json").read_text())
    series = load(folder / "samples.jsonl")
    findings = judge(series)
    picture = folder / "soak.svg"
    picture.write_text(plot(series, known["struck"], known["seconds"]))
    verdicts = Counter(each.verdict for each in findings)
    print(", ".join(f"{count} figures: {verdict}" for verdict, count in sorted(verdicts.items())))
    for each in findings:
        if each.verdict in {"grows", "kept"}:
            print(
                f"  {each.verdict}: {each.figure}, {each.name}: {each.first:g} to {each.last:g} in {each.lives} lives"
            )
    ended = "anomalies" in known
    print(known if ended else "it did not end", f"samples and picture: {folder}", sep="\n", flush=True)
    if publish and ended:
        shutil.copy(picture, table.PAGE.with_name("soak.svg"))
        found = json.dumps(known | {"findings": [asdict(each) for each in findings]})
        table.PAGE.with_name("soak.json").write_text(found + "\n")
        table.write(table.ROWS, table.PAGE)
    return 0 if ended and not known["anomalies"] and all(each.verdict != "grows" for each in findings) else 1


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=90.0, help=f"how long it goes on; at most {_LONGEST:g}")
    parser.add_argument("--rate", type=float, default=500.0, help=f"events a second; at most {_FASTEST:g}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--source", choices=("polling", "wal"), default="wal")
    parser.add_argument("--delivery", choices=("at-least-once", "exactly-once"), default="exactly-once")
    parser.add_argument("--brokers", type=int, choices=(1, 3), default=1)
    parser.add_argument(
        "--consumers", choices=("inbox", "spark", "both"), default="both", help="who applies the events, beside others"
    )
    parser.add_argument("--show", action="store_true", help="print the course and run nothing")
    parser.add_argument("--report", type=Path, help="run nothing; judge and draw what is in this folder")
    parser.add_argument(
        "--publish", action="store_true", help="soak.svg and a section of chaos.md, to docs/explanation"
    )
    given = parser.parse_args(words)
    if given.minutes > _LONGEST or given.rate > _FASTEST:
        parser.error(f"at most {_LONGEST:g} minutes and {_FASTEST:g} events a second")
    return given
