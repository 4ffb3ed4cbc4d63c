"""What `outbox consume` shows, without a consumer."""

from __future__ import annotations

import io

from rich.console import Console
from structlog.testing import ReturnLogger

from spark_jobs.cli.consume_view import by_topic, open_view

TOTALS = {
    "group": "orders",
    "read": 1500,
    "applied": 1490,
    "duplicates": 7,
    "dead": 3,
    "rounds": 2,
    "seconds": 3.25,
    "rows_per_second": 461.5,
}


def shown(*, fail: bool = False) -> str:
    """Run a live view against a terminal of 120 columns; give what was written."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with open_view(ReturnLogger(), live=True, console=console) as view:
        view.report("group taken over", {"generation": 7})
        view.report("planned", {"messages": 2000, "partitions": 2})
        for read in (1000, 1500):
            view.report("round", {**TOTALS, "read": read, "passed": 1000, "round_seconds": 1.5})
        view.report("waiting for a server", {"error": "[red]no brackets are lost[/red]"})
        if fail:
            return screen.getvalue()
        view.result(TOTALS, {"t1": {"read": 1400, "applied": 1400, "duplicates": 0, "dead": 0}})
    return screen.getvalue()


def test_a_bar_by_offsets_and_then_a_table():
    text = shown()
    assert "applying from 2 partitions" in text
    assert "0 of 2,000" in text
    assert "1,000 of 2,000" in text
    # Markers are no messages: the bar is full all the same.
    assert "2,000 of 2,000  462/s" in text
    assert "group taken over  generation=7" in text
    assert "error=[red]no brackets are lost[/red]" in text
    table = [" ".join(line.split()) for line in text.splitlines()]
    assert "│ t1 │ 1,400 │ 1,400 │ 0 │ 0 │ │ │ │" in table
    assert "│ orders │ 1,500 │ 1,490 │ 7 │ 3 │ 462 │ 2 │ 3.2 │" in table
    assert "3 became dead letters: outbox dead-letters list --side consumer --group orders" in text


def test_the_cursor_comes_back_when_the_run_fails():
    text = shown(fail=True)
    hidden, back = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hidden) >= 1
    assert back not in text
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    try:
        with open_view(ReturnLogger(), live=True, console=console):
            raise RuntimeError
    except RuntimeError:
        pass
    assert screen.getvalue().rindex(back) > screen.getvalue().rindex(hidden)


def test_without_a_terminal_there_are_log_lines_and_one_line(capsys):
    said = []

    class Log:
        def info(self, event: str, /, **figures: object) -> None:
            said.append((event, figures))

    with open_view(Log(), live=False) as view:
        view.report("round", {"read": 5})
        view.result(TOTALS, {})
        view.result(TOTALS | {"dead": 0}, {})
    assert said == [("round", {"read": 5})]
    assert capsys.readouterr().out == (
        "orders: read 1,500, applied 1,490, duplicates 7, dead letters 3 in 3.2 s\n"
        "orders: read 1,500, applied 1,490, duplicates 7 in 3.2 s\n"
    )


def test_topics_are_what_came_between_two_looks():
    def row(topic: str | None, applied: int, duplicates: int = 0, dead: int = 0) -> dict[str, object]:
        return {"topic": topic, "applied": applied, "duplicates": duplicates, "dead": dead}

    before = [row("b", 10, 2, 1), row("b", 5), row("a", 3)]
    after = [row("b", 12, 3, 2), row("b", 6), row("a", 3), row("c", 4)]
    assert by_topic(before, after) == {
        "b": {"read": 5, "applied": 3, "duplicates": 1, "dead": 1},
        "c": {"read": 4, "applied": 4, "duplicates": 0, "dead": 0},
    }
    assert by_topic([row(None, 0)], [row("a", 1)])["a"]["applied"] == 1
