"""What the tests of the WAL as a source share: fixtures to import, and the commands as a user runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import nursery
import psycopg
import pytest
from support import drained, look_up, wait_until

from relay.config import SourceKind
from relay.operations.wal_setup import Cdc, Status
from relay.wal.slot import SlotNames


@pytest.fixture
def wal(outbox_kafka) -> dict[str, Any]:
    """Settings of a relay that reads the WAL, of an outbox that no other test has."""
    name = outbox_kafka.name("outbox")
    return {
        "source": "wal",
        "name": name,
        "wal__slot": name.lower().replace("-", "_").replace(".", "_"),
        "relay__lease_seconds": 1.0,
        "relay__batch_size": 50,
    }


def run_outbox(
    url: str, settings: Mapping[str, Any], *arguments: str, program: Sequence[str] = ("-m", "relay.cli")
) -> subprocess.CompletedProcess[str]:
    """Run a command of the CLI with a relay's settings."""
    environment = os.environ | {f"OUTBOX_{name.upper()}": str(value) for name, value in settings.items()}
    return nursery.run([*program, *arguments], environment | {"OUTBOX_DATABASE_URL": url})


def done(url: str, settings: Mapping[str, Any], *arguments: str) -> str:
    result = run_outbox(url, settings, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@contextmanager
def cdc(url: str, settings: Mapping[str, Any]) -> Iterator[Cdc]:
    """What the commands call, without a process for each."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield Cdc(connection, SlotNames("outbox", settings["wal__slot"], "outbox_relay"))


def set_up(url: str, settings: Mapping[str, Any]) -> None:
    with cdc(url, settings) as commands:
        commands.setup()


def switch(url: str, settings: Mapping[str, Any], source: str) -> None:
    with cdc(url, settings) as commands:
        commands.switch(SourceKind(source))


def to_wal(url: str, settings: Mapping[str, Any]) -> None:
    set_up(url, settings)
    switch(url, settings, "wal")


def streaming(url: str) -> bool:
    return look_up(url, "SELECT bool_and(streaming) FROM outbox.lanes")[0][0]


def used_up(url: str, settings: Mapping[str, Any]) -> None:
    """Wait until the stream is used up to here and nothing is left in the table."""
    ((target,),) = look_up(url, "SELECT pg_current_wal_lsn()::text")
    # A heartbeat moves the slot on, but only for some WAL.
    look_up(url, "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 20000))")
    there = "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
    wait_until(lambda: look_up(url, there, target, settings["wal__slot"]) == [(True,)], 120, "the stream to be used up")
    drained(url)


def sources(url: str) -> set[tuple[str, str | None]]:
    """Source and living owner of every lane."""
    return set(
        look_up(url, "SELECT source, CASE WHEN lease_until > clock_timestamp() THEN owner END FROM outbox.lanes")
    )


def held_by(url: str, source: str, instance: str) -> bool:
    return sources(url) == {(source, instance)}


def status(url: str, settings: Mapping[str, Any]) -> Status:
    with cdc(url, settings) as commands:
        return commands.status()
