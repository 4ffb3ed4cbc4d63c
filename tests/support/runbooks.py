"""The runbooks as an operator follows them: their commands and queries, taken out of the page and run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psycopg
from docs_support import ROOT, anchor, blocks
from kafka_tools import kafka_transactions
from nursery import NURSERY
from support import wait_until
from typer.testing import CliRunner

from outbox.testing.fixtures import RelayProcess
from relay.cli.app import app

PAGE: Final = "docs/operations/runbooks.md"
_ASSIGNMENT: Final = re.compile(r"(OUTBOX_[A-Z_]+)=(.*)")
_ALERT: Final = re.compile(r"`((?:Outbox|Consumer)[A-Z]\w+)`")


@dataclass(frozen=True)
class Section:
    """One symptom: the alerts that it begins with, and what is to be typed."""

    title: str
    text: str
    alerts: frozenset[str]
    commands: tuple[str, ...]
    queries: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """Return what a link to it ends in."""
        return anchor(self.title)

    @property
    def steps(self) -> frozenset[str]:
        """Return everything that is to be typed."""
        return frozenset((*self.commands, *self.queries))


def _lines(script: str) -> list[str]:
    """Return the commands of a script, one a line, without comments."""
    found = (shlex.join(shlex.split(line, comments=True)) for line in script.replace("\\\n", " ").splitlines())
    return [line for line in found if line]


def _sections() -> dict[str, Section]:
    lines = (ROOT / PAGE).read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("## ")]
    found = {}
    typed = [block for block in blocks("sh", "sql") if block.page == PAGE]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        here = [block for block in typed if start < block.line <= end]
        opening = "\n".join(lines[start + 1 : end]).strip().partition("\n\n")[0]
        title = lines[start].removeprefix("## ")
        found[title] = Section(
            title,
            "\n".join(lines[start + 1 : end]),
            frozenset(_ALERT.findall(opening)) if opening.startswith("Alert") else frozenset(),
            tuple(line for block in here if block.language == "sh" for line in _lines(block.text)),
            tuple(block.text for block in here if block.language == "sql"),
        )
    return found


SECTIONS: Final = _sections()

PLACEHOLDERS: Final = frozenset(
    word
    for row in re.findall(r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \|", (ROOT / PAGE).read_text(), re.MULTILINE)
    for word in re.findall(r"[A-Z_]+", row)
)
"""The words of which the page says that they stand for something else."""


TYPED: Final[dict[str, set[str]]] = {}
"""By the title of a section, what the tests of this process have typed of it."""


def placeholders(step: str) -> set[str]:
    """Return the placeholders in a command or a query."""
    return {word for word in PLACEHOLDERS if re.search(rf"\b{word}\b", step)}


@dataclass
class Answer:
    """What a command printed, and its exit status."""

    status: int
    text: str


@dataclass
class Operator:
    """Somebody who follows one section.

    monitor, operator, owner   addresses of the database for who may look, who may act, and who owns the tables.
    settings   of the commands, as the relay or the consumer has them, by their names in fixtures of relays.
    start      starts a relay with some more settings.
    typed      the steps taken so far, those of sections too that this one has a link to.
    """

    section: Section
    monitor: str
    operator: str
    owner: str
    settings: Mapping[str, Any]
    start: Callable[..., RelayProcess]
    typed: set[str] = field(default_factory=set)

    def follow(self, title: str) -> Operator:
        """Go on with another section, to which this one has a link."""
        section = SECTIONS[title]
        assert f"(#{section.anchor})" in self.section.text, f"{self.section.title} does not lead to {title}"
        return replace(self, section=section)

    def look(self, command: str, **values: object) -> Answer:
        """Run a command of the section as one who may only look."""
        return self._run(command, self.monitor, values)

    def act(self, command: str, *, status: int = 0, **values: object) -> str:
        """Run a command of the section as an operator; give what it printed."""
        return self._done(command, self.operator, values, status)

    def own(self, command: str, *, status: int = 0, **values: object) -> str:
        """Run a command of the section as the tables' owner; give what it printed."""
        return self._done(command, self.owner, values, status)

    def run_relay(self, command: str, **settings: object) -> RelayProcess:
        """Run a command of the section that starts a relay, with settings that a test needs besides."""
        assignments, words = self._words(command, {})
        assert words[:3] == ["outbox", "relay", "run"], words
        named = {name.removeprefix("OUTBOX_").lower(): value for name, value in assignments.items()}
        return self.start(*words[3:], **settings | named)

    def watch(self, command: str, until: Callable[[str], bool]) -> None:
        """Run a command that goes on until Ctrl-C, until it has printed a certain line."""
        assignments, words = self._words(command, {})
        environment = os.environ | self._environment | assignments
        environment |= {"OUTBOX_DATABASE_URL": self.monitor, "PYTHONUNBUFFERED": "1"}
        with tempfile.TemporaryDirectory(prefix="outbox-watched-") as folder:
            out = Path(folder, "out")
            process = NURSERY.fork(["-m", "relay.cli", *words[1:]], environment, Path.cwd(), out)
            try:
                wait_until(lambda: any(map(until, out.read_text().splitlines())), what="a line of it")
            finally:
                process.signal(signal.SIGTERM)
                process.wait(30)

    def query(self, part: str, **values: object) -> list[dict[str, Any]]:
        """Return the rows of the section's query that has this text in it, as one who may only look sees them."""
        return self._query(part, self.monitor, values)

    def execute(self, part: str, **values: object) -> list[dict[str, Any]]:
        """Run the section's query that has this text in it, as the tables' owner."""
        return self._query(part, self.owner, values)

    @property
    def _environment(self) -> dict[str, str]:
        return {f"OUTBOX_{name.upper()}": str(value) for name, value in self.settings.items()}

    def _query(self, part: str, url: str, values: Mapping[str, object]) -> list[dict[str, Any]]:
        query = self._filled(self._only([one for one in self.section.queries if part in one], part), values)
        with psycopg.connect(url, autocommit=True, row_factory=psycopg.rows.dict_row) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    def _done(self, command: str, url: str, values: Mapping[str, object], status: int) -> str:
        answer = self._run(command, url, values)
        assert answer.status == status, answer.text
        return answer.text

    def _run(self, command: str, url: str, values: Mapping[str, object]) -> Answer:
        assignments, (program, *arguments) = self._words(command, values)
        if program == "curl":
            # Where nobody listens, it prints nothing.
            done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
            return Answer(done.returncode, done.stdout + done.stderr)
        if program == "kafka-transactions.sh":
            done = kafka_transactions(arguments)
            return Answer(done.returncode, done.stdout + done.stderr)
        assert program == "outbox", program
        environment = self._environment | {"OUTBOX_DATABASE_URL": url, "COLUMNS": "200"} | assignments
        result = CliRunner().invoke(app, arguments, env=environment, input="y\n")
        assert result.exception is None or isinstance(result.exception, SystemExit), (result.exception, result.output)
        return Answer(result.exit_code, result.output)

    def _words(self, command: str, values: Mapping[str, object]) -> tuple[dict[str, str], list[str]]:
        """Return the variables that a command sets, and its words. ``command``: the whole of it, or how it begins."""
        wanted = shlex.join(shlex.split(command))
        same = [one for one in self.section.commands if one == wanted]
        begun = [one for one in self.section.commands if f"{one} ".startswith(f"{wanted} ")]
        # The same command may stand in two places of a section.
        words = shlex.split(self._filled(self._only(list(dict.fromkeys(same or begun)), command), values))
        assignments = {}
        while match := _ASSIGNMENT.fullmatch(words[0]):
            assignments[match[1]] = match[2]
            words.pop(0)
        return assignments, words

    def _only(self, found: Sequence[str], wanted: str) -> str:
        assert len(found) == 1, f"{PAGE}, {self.section.title}: not one step is `{wanted}`, but {list(found)}"
        self.typed.add(found[0])
        TYPED.setdefault(self.section.title, set()).add(found[0])
        return found[0]

    def _filled(self, step: str, values: Mapping[str, object]) -> str:
        assert placeholders(step) == set(values), f"{step}: {sorted(placeholders(step))} want a value"
        for name, value in values.items():
            step = re.sub(rf"\b{name}\b", lambda _, value=value: str(value), step)
        return step
