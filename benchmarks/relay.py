"""Measure the relay beside Debezium and a bare loop, on a Postgres and a broker of its own.

    python benchmarks/relay.py [--only NAME …] [--ways TEXT …] [--rounds N] [--quick] [--list]
                               [--json FILE] [--set NAME=VALUE …] [--workers N] [--logs DIRECTORY]

Each scenario has several ways: the relay with each source and delivery, Debezium with each of its settings, the bare
loop. Every way of a scenario runs once in each round, in changing order, with a database and a topic of its own. Every
event is read back: a run that lost one, or has one out of order, is an error. Only public interfaces are used: the
commands, their settings, the tables and the topics.

``--list`` prints the scenarios and their ways. ``--only`` takes names of scenarios. ``--ways`` takes names of ways, or
parts of names: ``--ways ours`` leaves out Debezium and the bare loop. ``--set relay__batch_size=500`` sets
OUTBOX_RELAY__BATCH_SIZE=500 for every relay. The exit status is 1 when a run failed, whatever the figures are.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# This file is called like the package that it measures: the folder above comes first.
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console

from benchmarks.harness import report
from benchmarks.harness.choice import choose
from benchmarks.harness.results import Results, Run
from benchmarks.harness.scenarios import ALL, Scenario, Sizes
from benchmarks.harness.scenarios.base import QUICK
from benchmarks.harness.servers import Servers


def measure(console: Console, servers: Servers, scenario: Scenario, rounds: int, texts: list[str]) -> report.Chapter:
    """Run a scenario's rounds with the ways that ``--ways`` chooses."""
    runs: list[Run] = []
    ways = choose(scenario.ways, texts)
    for warming in scenario.warmed_by:
        try:
            scenario.run(servers, warming, Run(scenario.name, "warm-up", 0))
        except Exception as error:  # noqa: BLE001 - as below
            console.print(f"{scenario.name}: the warm-up FAILED: {error}", markup=False)
    for number in range(1, (1 if scenario.once else rounds) + 1):
        # The broker and the page cache get warmer from run to run: another one begins each round, and in each second
        # round the others go backwards.
        turn = (number - 1) % len(ways)
        first, *others = ways[turn:] + ways[:turn]
        for way in (first, *(others if number % 2 else others[::-1])):
            run = Run(scenario.name, way.name, number)
            started = time.monotonic()
            try:
                scenario.run(servers, way, run)
            except Exception as error:  # noqa: BLE001 - the others still run; the report shows it
                run.error = "\n".join([str(error) or repr(error), *getattr(error, "__notes__", [])])
            run.seconds = time.monotonic() - started
            shown = (
                "FAILED"
                if run.error is not None
                else ", ".join(
                    f"{metric.name} {metric.text(run.figures[metric.name])}"
                    for metric in scenario.metrics[:3]
                    if metric.name in run.figures
                )
            )
            console.print(f"{scenario.name} {number}: {way.name}: {shown} [{run.seconds:.0f} s]", markup=False)
            runs.append(run)
    # The order of the ways, not of the first round's turns.
    runs.sort(key=lambda run: run.round)
    servers.release()
    return report.Chapter(scenario, Results(runs))


def show_names(console: Console, scenarios: Sequence[Scenario]) -> None:
    for scenario in scenarios:
        console.print(f"{scenario.name}: {scenario.title}", markup=False)
        for way in scenario.ways:
            console.print(f"    {way.name}", markup=False)


def setting(text: str) -> tuple[str, str]:
    """Return the name and the value of ``--set``. Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, such as relay__batch_size=500; got {text!r}")
    return name, value


def main() -> int:
    """Run; print and write the report. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[scenario.name for scenario in ALL])
    parser.add_argument(
        "--ways", nargs="+", default=[], metavar="TEXT", help="only ways with these names, or parts of them"
    )
    parser.add_argument("--rounds", type=int, default=None, help="3 unless --quick: 1")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: to see that it works; the figures mean little"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--set", nargs="+", default=[], type=setting, metavar="NAME=VALUE", help="settings of every relay"
    )
    parser.add_argument("--workers", type=int, help="run every relay with this option of `outbox relay run`")
    parser.add_argument("--logs", type=Path, help="keep the logs there; otherwise only those of failures are kept")
    parser.add_argument("--list", action="store_true", help="print the scenarios and their ways, and exit")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200)
    sizes = QUICK if options.quick else Sizes()
    scenarios = [kind(sizes) for kind in ALL if not options.only or kind.name in options.only]
    if options.list:
        show_names(console, scenarios)
        return 0
    for text in options.ways:
        if not any(choose(scenario.ways, [text]) for scenario in scenarios):
            parser.error(f"--ways: no way is called {text!r}; --list prints the names")
    scenarios = [scenario for scenario in scenarios if choose(scenario.ways, options.ways)]
    rounds = options.rounds or (1 if options.quick else 3)
    settings = dict(options.set)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="outbox-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    chapters: list[report.Chapter] = []
    started = time.monotonic()
    arguments = [] if options.workers is None else ["--workers", str(options.workers)]
    with Servers(folder, settings, arguments) as servers:
        about = report.facts(servers, sizes, rounds, settings)
        for scenario in scenarios:
            chapters.append(measure(console, servers, scenario, rounds, options.ways))
            # Written again after each one: a long run that is ended leaves what it has.
            if options.json:
                options.json.write_text(report.as_json(chapters, about))
    for chapter in chapters:
        report.show(console, chapter)
    failed = [run for chapter in chapters for run in chapter.results.runs if run.error is not None]
    console.print(f"{time.monotonic() - started:.0f} s; {len(failed)} runs failed")
    if failed or options.logs:
        console.print(f"logs: {folder}", markup=False)
    else:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
