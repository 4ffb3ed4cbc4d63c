"""``outbox cdc`` and ``outbox relay switch`` as a user runs them: what their tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from support import wait_until
from typer.testing import CliRunner

from outbox.testing.fixtures import token
from relay.cli.app import app


class Shell:
    """Types commands for one outbox, and looks into its database."""

    def __init__(self, database: Any, slot: str, **environment: str) -> None:
        self.url = database.url
        self.slot = slot
        self.admin = database.connect(autocommit=True)
        self._environment = {"OUTBOX_DATABASE_URL": database.url, "OUTBOX_WAL__SLOT": slot} | environment

    def __call__(self, command: str, *arguments: str, answer: str | None = None, **environment: str) -> tuple[int, str]:
        """Run a command; give its exit status and what it printed. Never a traceback."""
        done = CliRunner().invoke(
            app, [*command.split(), *arguments], env=self._environment | environment, input=answer
        )
        assert done.exception is None or isinstance(done.exception, SystemExit), (done.exception, done.output)
        return done.exit_code, done.output

    def done(self, command: str, *arguments: str, **options: Any) -> str:
        status, output = self(command, *arguments, **options)
        assert status == 0, output
        return output

    def refused(self, command: str, *arguments: str, **options: Any) -> tuple[int, str]:
        status, output = self(command, *arguments, **options)
        assert status != 0, output
        assert output.startswith("outbox: "), output
        assert output.count("\n") == 1, output
        return status, output

    def query(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.admin.execute(text, values or None).fetchall()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read the slot meanwhile, as a relay does."""
        look = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        with closing(psycopg.connect(self.url, autocommit=True, replication="database")) as connection:
            connection.pgconn.send_query(
                f"START_REPLICATION SLOT {self.slot} LOGICAL 0/0 "
                "(proto_version '1', publication_names 'outbox_relay')".encode()
            )
            wait_until(lambda: self.query(look, self.slot) == [(True,)], 10, "the slot to be read")
            yield
        wait_until(lambda: self.query(look, self.slot) == [(False,)], 10, "the slot to be free")

    def slots(self) -> int:
        return self.query("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", self.slot)[0][0]

    def publications(self) -> list[str]:
        return [name for (name,) in self.query("SELECT pubname FROM pg_publication ORDER BY 1")]

    def audit(self) -> list[tuple[str, str | None]]:
        return self.query("SELECT what, why FROM outbox.audit ORDER BY id")

    def event(self) -> None:
        self.admin.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('A', '1', 'T')"
        )


@pytest.fixture
def shell(outbox_postgres):
    # A slot goes with its database.
    return Shell(outbox_postgres, f"slot_{token()}")
