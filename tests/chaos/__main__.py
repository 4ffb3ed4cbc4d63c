"""The command behind `make chaos`: every chosen seed in every chosen configuration, one run after the other.

    make chaos                                                    the matrix: 64 runs of 60 s, see _SEEDS
    make chaos ARGS="--seeds 3 --source wal --brokers 1 --delivery exactly-once"
    make chaos ARGS="--show --seeds 3"                            print the courses, run nothing
    make chaos ARGS="--seeds 1-5 --source polling --brokers 1 --delivery at-least-once
                     --mutation quick_marks+freed_keys_overtake"  is the mutant found?

Each run is added to the file of JSON lines as it ends, and the page is written anew: an interrupted matrix keeps what
it has. The exit status is 1 when a run had an anomaly; the logs of its relays stay in the folder that is printed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
import traceback
from itertools import product
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parents[2]
# In the place of this folder, whose modules are those of a package.
sys.path[:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

import machine  # noqa: E402

# What a soak writes in 90 minutes would fill the memory.
machine.prepare(in_memory=sys.argv[1:2] != ["soak"])

from chaos import soak, table  # noqa: E402
from chaos.course import Configuration, Course, course_of  # noqa: E402
from chaos.run import run  # noqa: E402
from chaos.stage import KafkaSite  # noqa: E402

_SEEDS: Final = {"at-most-once": range(1, 5), "at-least-once": range(1, 8), "exactly-once": range(1, 8)}
"""Of each configuration, unless others are chosen: 2 of at-most-once, 8 of the others."""


def main() -> int:
    """Run what the arguments choose."""
    if sys.argv[1:2] == ["soak"]:
        return soak.main(sys.argv[2:])
    given = _arguments()
    if given.traces:
        given.source = ["polling"]
        given.delivery = [each for each in given.delivery if each != "at-most-once"]
    configurations = [
        Configuration(
            source,
            delivery,
            brokers,
            given.seconds,
            operators=given.operators and not given.traces,
            consumers=given.consumers,
            traces=given.traces,
        )
        for brokers, source, delivery in product(given.brokers, given.source, given.delivery)
        if (source, delivery) != ("wal", "at-most-once")
    ]
    courses = [course_of(seed, each) for each in configurations for seed in given.seeds or _SEEDS[each.delivery]]
    if given.show:
        print(*courses, sep="\n")
        return 0
    failed = 0
    for brokers in given.brokers:
        with KafkaSite(brokers) as site:
            for course in courses:
                if course.configuration.brokers == brokers:
                    failed += not _one(course, site, given)
    print(f"{len(courses)} runs, {failed} of them failed; {given.page}")
    return 1 if failed else 0


def _one(course: Course, site: KafkaSite, given: argparse.Namespace) -> bool:
    configuration = course.configuration
    name = f"{configuration.source}-{configuration.delivery}-{configuration.brokers}-{course.seed}"
    date = dt.datetime.now(dt.UTC)
    folder = given.logs / f"{name}-{date:%H%M%S}"
    try:
        result = run(course, site, folder, lambda text: print(text, flush=True), given.mutation)
    except Exception:  # noqa: BLE001 - a run that can't be carried out is a failed one, whatever the reason
        # The next run has a database and topics of its own; what is broken for good fails it as well.
        traceback.print_exc()
        print(f"FAILED: {name} did not end, see {folder}", flush=True)
        return False
    if given.mutation == "none":
        table.append(
            given.rows, {"date": date.isoformat(timespec="seconds"), "commit": table.commit(), **result.as_json()}
        )
        table.write(given.rows, given.page)
    print(f"{'sound' if result.sound else 'ANOMALIES'}: {name}: {result.verdict}", flush=True)
    print(f"  {result.as_json()}", flush=True)
    if not result.sound:
        print("\n  ".join([f"  logs in {folder}", *result.standing]), flush=True)
    return result.sound


def _seeds(text: str) -> list[int]:
    """Return the seeds of ``3`` or ``1-5`` or ``1,4,7-9``."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=_seeds, help="such as 3, 1-5 or 1,4,7-9")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the load and the faults go on")
    parser.add_argument("--source", nargs="+", choices=("polling", "wal"), default=["polling", "wal"])
    parser.add_argument(
        "--delivery", nargs="+", choices=list(_SEEDS), default=list(_SEEDS), help="at-most-once reads no WAL"
    )
    parser.add_argument("--brokers", nargs="+", type=int, choices=(1, 3), default=[1, 3])
    parser.add_argument(
        "--operators",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="between the faults: discard, retry, pause, drain, replay; add partitions; change source, delivery, lanes",
    )
    parser.add_argument(
        "--consumers",
        choices=("inbox", "spark", "both"),
        default="inbox",
        help="who applies the events; Spark takes a core, and its job's atomic goes by the seed; both: each as a group",
    )
    parser.add_argument(
        "--traces",
        action="store_true",
        help="relays record their steps, and the specification must explain them; only polling, without operators",
    )
    parser.add_argument("--mutation", default="none", help="of tests/support/mutant.py: is it found? Not in the table")
    parser.add_argument("--show", action="store_true", help="print the courses and run nothing")
    parser.add_argument("--rows", type=Path, default=table.ROWS, help="the file of JSON lines")
    parser.add_argument("--page", type=Path, default=table.PAGE, help="the page with the table")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "chaos", help="logs of runs with an anomaly")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
