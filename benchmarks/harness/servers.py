"""The servers that all scenarios share, and a site: one run's own database and topic on them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import psycopg
from psycopg import sql

from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.postgres import PostgresServer
from outbox.testing.fixtures import Topics

ROOT: Final = Path(__file__).parents[2]
PARTITIONS: Final = 4
LANES: Final = 4
# One line per statement, with its database. max_connections: a relay may open one for each of 256 lanes.
_POSTGRES: Final = {"log_line_prefix": "%m [%p] db=%d ", "max_connections": "700", "max_replication_slots": "40"}


class BenchError(Exception):
    """A run did not do what it should have done; the message says what."""


def wait_until(condition: Callable[[], bool], what: str, seconds: float, every: float = 0.02) -> None:
    """Return when the condition holds. Raises BenchError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not within {seconds:g} s")
        time.sleep(every)


@dataclass
class Site:
    """One run's database and topic. Its names end with the site's token, so that runs share nothing.

    token      also the suffix of the slot, the relay's name and the groups.
    kind       the aggregate type of its events, in lower case: Debezium's topics keep the case.
    settings   OUTBOX_… settings for every command of this site.
    """

    url: str
    kafka: str
    token: str
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return f"bench{self.token}"

    @property
    def topic(self) -> str:
        return f"{self.kind}-events"

    @property
    def database(self) -> str:
        return f"bench_{self.token}"

    def environment(self, **settings: object) -> dict[str, str]:
        """Return the environment of a command or relay: this checkout, this site, and no settings of the user's."""
        found = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        given = {**self.settings, **{name: str(value) for name, value in settings.items()}}
        return {
            **found,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "OUTBOX_DATABASE_URL": self.url,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": self.kafka,
            "OUTBOX_NAME": f"bench{self.token}",
            "OUTBOX_WAL__SLOT": f"bench_{self.token}",
            **{f"OUTBOX_{name.upper()}": value for name, value in given.items()},
        }

    def outbox(self, *arguments: str, **settings: object) -> None:
        """Run an ``outbox`` command. Raises BenchError with its output when it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "relay.cli", *arguments],
            env=self.environment(**settings),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"outbox {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")

    @contextlib.contextmanager
    def connect(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            yield connection

    def value(self, query: str, *bound: object) -> Any:
        """Return the first value of a query's first row."""
        with self.connect() as connection:
            row = connection.execute(query.encode(), bound).fetchone()
        assert row is not None
        return row[0]


class Servers:
    """One Postgres (fsync on) and one broker, for the whole benchmark.

    folder     where logs go; the caller removes it.
    settings   OUTBOX_… settings for every relay and command, without the prefix.
    arguments  of every ``outbox relay run``.
    """

    def __init__(self, folder: Path, settings: dict[str, str] | None = None, arguments: Sequence[str] = ()) -> None:
        self.folder = folder
        self.arguments = tuple(arguments)
        self.settings = dict(settings or {})
        self.postgres = PostgresServer(settings=_POSTGRES)
        self.kafka = KafkaCluster(heap="1g")
        self.kept: dict[object, AbstractContextManager[Any]] = {}
        """What runs started and later runs use again."""
        self._kept = contextlib.ExitStack()
        self._templates: set[int] = set()

    def keep(self, name: object, started: AbstractContextManager[Any]) -> None:
        """Enter a context, and leave it with ``release`` or at the end."""
        self.kept[name] = self._kept.enter_context(started)

    def release(self) -> None:
        """End what was kept."""
        self.kept.clear()
        self._kept.close()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            opened.enter_context(self.postgres)
            opened.enter_context(self.kafka)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._opened:
            self.release()

    @contextlib.contextmanager
    def site(self, name: str, lanes: int = LANES) -> Iterator[Site]:
        """Make a database with the outbox's tables and a topic; remove both at the end.

        The topic's messages carry the broker's time, so that one clock says when each was appended.
        """
        topics = Topics(self.kafka.bootstrap_servers)
        token = topics.token
        folder = self.folder / f"{name}-{token}".replace(" ", "-").replace("/", "-").replace(",", "")
        folder.mkdir(parents=True)
        template = self._template(lanes)
        url = self.postgres.create_database(f"bench_{token}", template)
        site = Site(url, self.kafka.bootstrap_servers, token, folder, self.settings)
        try:
            topics.create_topic(site.topic, PARTITIONS, {"message.timestamp.type": "LogAppendTime"})
            yield site
        except Exception as error:
            try:
                self._remove(site, topics)
            except Exception as another:  # noqa: BLE001 - the first error is the one to be shown
                error.add_note(f"The site was not removed: {another}")
            raise
        else:
            self._remove(site, topics)

    def _template(self, lanes: int) -> str:
        """Return the name of a database with the tables for so many lanes, made once."""
        name = f"bench_template_{lanes}"
        if lanes not in self._templates:
            url = self.postgres.create_database(name)
            site = Site(url, self.kafka.bootstrap_servers, "template", self.folder, self.settings)
            site.outbox("db", "upgrade")
            if lanes != LANES:
                site.outbox("db", "lanes", str(lanes))
            self._templates.add(lanes)
        return name

    def _remove(self, site: Site, topics: Topics) -> None:
        self.postgres.drop_database(site.database)
        with psycopg.connect(self.postgres.url(), autocommit=True) as connection:
            for (role,) in connection.execute(
                "SELECT rolname FROM pg_roles WHERE rolname LIKE %s", (f"%{site.token}",)
            ).fetchall():
                connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))
            # What this run left to be written must not fall into the next one.
            connection.execute("CHECKPOINT")
        topics.delete()
