"""Times and days at the edges, as commands take them: refused in one line, before anything is connected to."""

from __future__ import annotations

import datetime as dt

import pytest
from typer.testing import CliRunner

from outbox._app.text import as_utc
from outbox.errors import ConfigurationError
from relay.cli.app import app

NOBODY = "postgresql://nobody@127.0.0.1:1/none"
EVENT = "0195d9c2-5c00-7abc-8def-0123456789ab"
COMMANDS = {
    "--since": [
        ["audit"],
        ["audit", "--follow"],
        ["recover", "--dry-run"],
        ["replay", "--dry-run"],
        ["trace", EVENT],
    ],
    "--until": [["audit"], ["recover", "--dry-run", "--since", "2026-01-31"], ["replay", "--dry-run"]],
    "--to": [["offsets", "reset", "group", "--topic", "topic", "--dry-run"]],
}
EDGES = [
    "0001-01-01",
    "0001-01-01T00:00:00+05:00",
    "1969-12-31T23:59:59.999999Z",
    "1970-01-01T00:00:00+00:01",
    "9999-01-01",
    "9998-12-31T23:59:59-00:01",
    "9999-12-31T23:59:59.999999-05:00",
]


def run(*words: str) -> tuple[int, str]:
    environment = {"OUTBOX_DATABASE_URL": NOBODY, "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    done = CliRunner().invoke(app, words, env=environment)
    assert isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("option", "command"), [(name, words) for name, all_of in COMMANDS.items() for words in all_of]
)
def test_times_that_a_command_can_not_count_with_are_refused(option: str, command: list[str]) -> None:
    for text in EDGES:
        status, shown = run(*command, option, text)
        assert (status, shown.count("\n")) == (2, 1), shown
        assert shown.startswith(f"outbox: {option} {text[:10]} "), shown
        assert shown.endswith("must be a time of the years 1970 to 9998, in UTC\n")
    # No time at all.
    for text in ("10000-01-01", "2026-02-30", "2026-01-31T00:00:00+24:00"):
        assert run(*command, option, text)[0] == 2


def test_the_first_and_the_last_time_are_taken() -> None:
    for text in ("1970-01-01T00:00:00", "9998-12-31T23:59:59.999999+00:00", "1970-01-01T05:00:00+05:00"):
        time = dt.datetime.fromisoformat(text)
        known = as_utc("--since", time)
        assert (known.tzinfo is not None, known.replace(tzinfo=None)) == (True, time.replace(tzinfo=None))
        assert dt.datetime(1969, 12, 31, tzinfo=dt.UTC) < known - dt.timedelta(hours=1)
    assert as_utc("--since", None) is None
    with pytest.raises(ConfigurationError, match="--since 1969"):
        as_utc("--since", dt.datetime(1969, 12, 31))


@pytest.mark.parametrize(
    "command", [["db", "prune"], ["db", "prune", "--consumer"], ["external", "forget"]], ids=" ".join
)
def test_days_that_no_calendar_has_are_refused(command: list[str]) -> None:
    for days in ("-1", "1000000", "1" + "0" * 30):
        status, shown = run(*command, "--days", days)
        assert (status, "Invalid value for '--days'" in shown) == (2, True), shown
