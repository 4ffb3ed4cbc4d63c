"""Jobs of the format "outbox", and a writer that dies where a test wants it; imported by Spark's Python processes.

A test plans each trouble in the table ``trouble``, and it comes once.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import psycopg
from psycopg import sql

from spark_jobs import ConsumerJob, Insert
from spark_jobs.driver.outbox_sink import OutboxSinkSource, OutboxWriter

SEEN = "CREATE TABLE IF NOT EXISTS seen (n bigint)"
EFFECT = "INSERT INTO seen SELECT n FROM batch ORDER BY n"
TROUBLE = "CREATE TABLE IF NOT EXISTS trouble (what text)"


class Planned(Exception):
    """The trouble that a test has planned."""


def comes(url: str, what: str) -> bool:
    """Return whether this trouble was planned, once."""
    with psycopg.connect(url, autocommit=True) as connection:
        if connection.execute("SELECT to_regclass('public.trouble') IS NULL").fetchone() == (True,):
            return False
        return connection.execute("DELETE FROM public.trouble WHERE what = %s", (what,)).rowcount > 0


def die(what: str) -> None:
    """Kill this process; before it Spark's JVM, unless what dies is only this one."""
    if what.startswith("driver"):
        for parent in psutil.Process().parents():
            if parent.name() == "java":
                parent.kill()
                break
    os.kill(os.getpid(), signal.SIGKILL)


def _troubled(cursor: psycopg.Cursor[Any]) -> None:
    info = cursor.connection.info
    url = psycopg.conninfo.make_conninfo(info.dsn, password=info.password)
    if comes(url, "commit dies within"):
        die("commit dies within")
    if comes(url, "effect fails"):
        raise Planned
    if comes(url, "session ends"):
        with psycopg.connect(url) as connection:
            connection.execute(sql.SQL("SELECT pg_terminate_backend({})").format(info.backend_pid))
        cursor.execute("SELECT 1")


def _numbers(cursor: psycopg.Cursor[Any], rows: Any) -> None:
    cursor.executemany("INSERT INTO seen VALUES (%s)", [(n,) for n in rows.column("n").to_pylist()])
    _troubled(cursor)


def _counts(cursor: psycopg.Cursor[Any], _: Any) -> None:
    cursor.execute("INSERT INTO window_counts SELECT k, number FROM batch")
    _troubled(cursor)


numbers = ConsumerJob("numbers", effect=_numbers, setup=SEEN)
plain = ConsumerJob("numbers", effect=EFFECT, setup=SEEN)
moving = ConsumerJob("numbers", effect=EFFECT, transform=lambda rows: rows)
typed = ConsumerJob(
    "typed",
    effect=Insert("typed"),
    setup="CREATE TABLE IF NOT EXISTS typed (n int, at timestamptz, price numeric(10,2), raw bytea, detail jsonb, "
    "list jsonb, named jsonb)",
)
WINDOW_COUNTS = "CREATE TABLE IF NOT EXISTS window_counts (k bigint, number bigint)"
counted = ConsumerJob("counts", effect=_counts, setup=WINDOW_COUNTS)
PAID = "CREATE TABLE IF NOT EXISTS paid (n bigint, minutes bigint)"
paid = ConsumerJob("paid", effect=Insert("paid"), setup=PAID)


class Troubled(OutboxSinkSource):
    """The sink, as the format "troubled"."""

    @classmethod
    def name(cls) -> str:
        return "troubled"

    def streamWriter(self, schema: Any, overwrite: bool) -> OutboxWriter:  # noqa: N802
        writer = super().streamWriter(schema, overwrite)
        writer.__class__ = TroubledWriter
        return writer


class TroubledWriter(OutboxWriter):
    def write(self, iterator: Any) -> Any:
        self._come("task dies before")
        staged = super().write(iterator)
        self._come("task dies after")
        return staged

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        url = self.plan.url
        if comes(url, "rows are lost"):
            with psycopg.connect(url) as connection:
                table = sql.Identifier(self.plan.schema, messages[0].table)
                connection.execute(sql.SQL("TRUNCATE {}").format(table))
        super().commit(messages, batchId)
        if comes(url, "commit runs twice"):
            super().commit(messages, batchId)
        self._come("commit dies after", f"commit of batch {batchId} dies after", "driver dies after")
        if comes(url, "commit fails after") or comes(url, f"commit of batch {batchId} fails after"):
            raise Planned

    def _come(self, *troubles: str) -> None:
        for what in troubles:
            if comes(self.plan.url, what):
                die(what)
