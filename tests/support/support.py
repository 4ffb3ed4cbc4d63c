"""What several tests need: a load of business transactions, and a checker that holds the topic against them.

Fixtures in here are for import.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self
from uuid import UUID

import psutil
import psycopg
import pytest
from confluent_kafka import Message
from invariants import Invariant
from psycopg import sql
from threads import Threads

from outbox import Event, Outbox
from outbox._app.settings import FailureSettings
from outbox._clients import search_path
from outbox.consumer import connections
from outbox.sandbox._process import patience
from outbox.testing.fixtures import RelayProcess
from relay.wal.lane_hash import lane_of

IMPATIENT: Final = (str(Path(__file__).with_name("impatient.py")),)
"""The ``program`` of a relay with less patience."""

MUTANT: Final = str(Path(__file__).with_name("mutant.py"))
"""The program of relays that lack something, which follows; see there."""


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting comes from the environment nor from a file, in each module that has this among its names."""
    for name in list(os.environ):
        if name.startswith("OUTBOX_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def order(outbox_kafka):
    """An aggregate type, and its topic of three partitions."""
    kind = outbox_kafka.name("Order")
    return kind, outbox_kafka.create_topic(f"{kind.lower()}-events", 3)


def numbers_by_key(messages: Sequence[Message], field: str) -> tuple[dict[str, list[int]], int]:
    """Return the numbers of a payload field by key, for a reader that drops repeats, and how many were repeated."""
    seen: dict[str, list[int]] = defaultdict(list)
    ids: set[bytes] = set()
    for message in messages:
        event_id = dict(message.headers())["ce_id"]
        if event_id not in ids:
            ids.add(event_id)
            seen[message.key().decode()].append(json.loads(message.value())[field])
    return dict(seen), len(messages) - len(ids)


def wait_until(
    condition: Callable[[], Any], seconds: float = 30.0, what: str = "the condition", longest: float = 0.05
) -> Any:
    """Wait for a condition with a deadline, which a slow machine may pass $OUTBOX_PATIENCE times; give its value.

    longest   the pause between two looks, in the end: more where a look starts a process.
    """
    seconds *= patience()
    deadline = time.monotonic() + seconds
    # At once at first. What takes long may take 50 ms more: each look costs processor time, here and in Postgres. Where
    # a look itself takes long, two thirds of the time are pauses.
    pause = 0.005
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(max(pause, min(2 * (now - began), 0.5)))
        pause = min(longest, 1.5 * pause)


_connections: dict[str, psycopg.Connection[Any]] = {}
_opening = threading.Lock()


def look_up(url: str, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a query that a test asks again and again, over a connection that stays open until its end.

    To open one takes far more processor time than to ask, here and in Postgres. A connection that broke since the last
    query is replaced. Raises OperationalError while Postgres is away.
    """
    connection = _connections.get(url)
    if connection is not None:
        try:
            return connection.execute(query, values or None).fetchall()
        except psycopg.OperationalError:
            # Killed, restarted, promoted: only a new connection shows whether it is back.
            connection.close()
    # Without prepared statements: tests change tables under this connection.
    connection = psycopg.connect(url, autocommit=True, prepare_threshold=None)
    with _opening:
        # Another thread, as that of a handler, may have opened one meanwhile.
        kept = _connections.get(url)
        if kept is None or kept.closed:
            kept = _connections[url] = connection
    if kept is not connection:
        connection.close()
    return kept.execute(query, values or None).fetchall()


def carry_out(url: str, statement: str, values: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
    """Execute a statement over the same connection, and commit it. Return its rows, if it has any."""
    look_up(url, "SELECT 1")
    cursor = _connections[url].execute(statement, values)
    return cursor.fetchall() if cursor.description is not None else []


def close_connections() -> None:
    """Close what ``look_up`` keeps open. conftest.py does it after each test."""
    while _connections:
        _connections.popitem()[1].close()


def stop_clock(url: str, days: int = -1) -> tuple[dt.date, str]:
    """Return a day (UTC) and libpq's options for connections on which it stays noon of that day, however late it gets.

    They find now() and clock_timestamp() in a schema of their own first, if ``with_path_of_role`` lets them. Defaults
    of tables still tell the real time.
    The day is yesterday: what goes by the real time after all fails at any hour, and not at midnight only. Or it is
    so many days from today; for connections that are open already, too.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        [(today,)] = connection.execute(
            "SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date + %s::integer", (days,)
        ).fetchall()
        noon = dt.datetime.combine(today, dt.time(12), dt.UTC)
        connection.execute("CREATE SCHEMA IF NOT EXISTS stopped; GRANT USAGE ON SCHEMA stopped TO public")
        for function in ("now", "clock_timestamp"):
            connection.execute(
                sql.SQL(
                    "CREATE OR REPLACE FUNCTION stopped.{}() RETURNS timestamptz LANGUAGE sql STABLE RETURN {}"
                ).format(sql.Identifier(function), sql.Literal(noon))
            )
    return today, "-c search_path=stopped,pg_catalog,public"


@pytest.fixture
def with_path_of_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the product's sessions in this process the search path that they are opened with."""
    monkeypatch.setattr(search_path.PinnedConnection, "pin", lambda _self: None)
    monkeypatch.setattr(connections, "_BEGIN_PINNED", connections._BEGIN)


def tried(attempts: int, first_seconds: float, longest_seconds: float) -> FailureSettings:
    """The settings by which a failed event is tried so often, with these waits."""
    return FailureSettings(
        max_attempts=attempts, min_backoff_seconds=first_seconds, max_backoff_seconds=longest_seconds
    )


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with names as ``relay__lease_seconds`` as ``load`` takes them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, inner = name.partition("__")
        if inner:
            found.setdefault(section, {})[inner] = value
        else:
            found[name] = value
    return found


def write(url: str, events: Iterable[Event]) -> list[UUID]:
    """Write events in one transaction, and return their ids."""
    with psycopg.connect(url) as connection:
        return list(Outbox().add_many(connection, list(events)))


def backlog(url: str) -> int:
    """How many events are not published yet; -1 while Postgres is away."""
    try:
        return look_up(url, "SELECT count(*) FROM outbox.events")[0][0]
    except psycopg.OperationalError as error:
        if not server_went_away(error):
            raise
        return -1


def drained(url: str, seconds: float = 60.0) -> None:
    """Wait until all events are published."""
    wait_until(lambda: backlog(url) == 0, seconds, "the outbox to drain")


def caught_up(url: str) -> None:
    """Wait until what is in the outbox now has left it, however much comes behind it."""
    [(highest,)] = look_up(url, "SELECT coalesce(max(id), 0) FROM outbox.events")
    left = "SELECT count(*) FROM outbox.events WHERE id <= %s"
    wait_until(lambda: look_up(url, left, highest) == [(0,)], 90, "the relay to publish what is there")


def logged(relay: RelayProcess, text: str) -> list[dict[str, Any]]:
    """Return the lines with this text of a relay that logs JSON. The last one may be half written, and is left out."""
    return [json.loads(line) for line in relay.log().split("\n")[:-1] if text in line]


def await_stops(relay: RelayProcess, lanes: int) -> None:
    """Wait until each of the lanes has been stopped, by a relay that logs JSON. It says so once a minute."""

    def stopped() -> bool:
        lines = logged(relay, '"lane stopped"')
        return len({lane for line in lines for lane in line["lanes"].split(", ")}) == lanes

    wait_until(stopped, what="every lane to stop")


def ends(relay: RelayProcess) -> None:
    """Ask a relay to end, which it has to do in order."""
    relay.terminate()
    assert relay.wait() == 0, relay.log()[-3000:]


def halted(relay: RelayProcess) -> bool:
    """Return whether a relay has been stopped, as by SIGSTOP."""
    return psutil.Process(relay.pid).status() == psutil.STATUS_STOPPED


def owners(url: str) -> dict[str, int]:
    """Living lanes by owner."""
    query = "SELECT owner, count(*) FROM outbox.lanes WHERE lease_until > clock_timestamp() GROUP BY owner"
    return dict(look_up(url, query))


# The server is shutting down, has crashed, or is starting.
_AWAY = {"57P01", "57P02", "57P03"}


def server_went_away(error: Exception, connection: psycopg.Connection[Any] | None = None) -> bool:
    """Return whether an error is what a crash or a stop of the server does to its clients.

    A deadlock, a lock that is not granted and a cancelled statement are OperationalError as well, and none of these.
    A Rollback comes out of ``transaction()`` where the connection broke before it could be rolled back.
    """
    if isinstance(error, psycopg.Rollback):
        return connection is not None and connection.closed
    if not isinstance(error, psycopg.OperationalError):
        return False
    # Without a code it is the client's own: refused, reset, timed out.
    return error.sqlstate is None or error.sqlstate[:2] == "08" or error.sqlstate in _AWAY


class Load:
    """Business transactions from several threads: each raises a counter of some of its keys and writes the events.

    Every key has one writer at a time, so its counters are committed in order. Some transactions are rolled back, and
    some stay open for a while before they commit. What is committed is in the table ``business``. Each thread rests
    ``pause`` seconds between transactions while a test waits for ``more``, and longer while it waits for anything else:
    each turn costs a broker more processor time than the events in it cost us.
    """

    def __init__(self, url: str, aggregate_type: str, *, threads: int = 3, keys: int = 40, pause: float = 0.02) -> None:
        self._url = url
        self._type = aggregate_type
        self._pause = pause
        self._stop = threading.Event()
        self._wanted = threading.Event()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS business (key text PRIMARY KEY, seq int NOT NULL)")
        own = {n: [f"k{n}-{key}" for key in range(keys)] for n in range(threads)}
        self._threads = Threads({f"load {n}": partial(self._run, n, own[n]) for n in own}, stop=self._stop)

    def __enter__(self) -> Self:
        self._threads.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Finish the transactions under way."""
        self._threads.stop()

    def more(self, count: int, seconds: float = 30.0) -> None:
        """Wait until so many more events are committed."""
        goal = self.committed() + count
        self._wanted.set()
        wait_until(lambda: self.committed() >= goal, seconds, f"{count} more events")
        self._wanted.clear()

    def kind(self, _key: str) -> str:
        """Return the aggregate type of a key."""
        return self._type

    def drain(self, seconds: float = 60.0) -> None:
        """Finish, and wait until all events are published."""
        self.stop()
        drained(self._url, seconds)

    def committed(self) -> int:
        """How many events are committed."""
        return look_up(self._url, "SELECT coalesce(sum(seq), 0) FROM business")[0][0]

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._url)

    def _run(self, number: int, keys: list[str]) -> None:
        chance = random.Random(number)
        outbox = Outbox()
        connection: psycopg.Connection[Any] | None = None
        try:
            while not self._stop.is_set():
                try:
                    connection = connection or self._connect()
                    self._transaction(connection, outbox, chance, keys)
                    self._stop.wait(self._pause if self._wanted.is_set() else 0.1)
                except (psycopg.OperationalError, psycopg.Rollback) as error:
                    if not server_went_away(error, connection):
                        raise
                    # Whether the last commit counted, the table knows.
                    if connection is not None:
                        connection.close()
                    connection = None
                    self._stop.wait(0.05)
        finally:
            if connection is not None:
                connection.close()

    def _transaction(
        self, connection: psycopg.Connection[Any], outbox: Outbox, chance: random.Random, keys: list[str]
    ) -> None:
        with connection.transaction():
            for key in chance.sample(keys, chance.randint(1, 4)):
                row = connection.execute(
                    "INSERT INTO business VALUES (%s, 1) "
                    "ON CONFLICT (key) DO UPDATE SET seq = business.seq + 1 RETURNING seq",
                    (key,),
                ).fetchone()
                outbox.add(connection, Event(self.kind(key), key, "Counted", {"seq": row[0]}))
            if chance.random() < 0.1:
                # A transaction that commits late, after others with higher ids.
                self._stop.wait(0.03)
            if chance.random() < 0.1:
                raise psycopg.Rollback


@dataclass(frozen=True)
class Crash:
    """A relay that was killed: when, and which lanes it held."""

    at: float
    lanes: frozenset[int]


def end_leases(url: str, instance: str | None = None) -> frozenset[int]:
    """Free the lanes of a relay that is dead, as time would; None: of all relays. Return which it held."""
    with psycopg.connect(url, autocommit=True) as connection:
        held = connection.execute(
            "UPDATE outbox.lanes SET lease_until = '-infinity' "
            "WHERE lease_until > clock_timestamp() AND owner = coalesce(%s, owner) RETURNING lane",
            (instance,),
        ).fetchall()
        # It counts no more among those that share the lanes.
        connection.execute("DELETE FROM outbox.relays WHERE instance = coalesce(%s, instance)", (instance,))
    return frozenset(lane for (lane,) in held)


class Crashes:
    """Relays that a test kills, and what each kill had sent twice.

    ``note`` ends the leases of a relay that was killed at once, as time would. So the leases can be longer than any
    pause of a slow machine: no relay outlasts one, and what stands in a topic twice does so because of a kill.
    """

    def __init__(self, url: str, aggregate_type: str, batch_size: int, lanes: int = 4) -> None:
        self._url = url
        self._type = aggregate_type
        self._batch_size = batch_size
        self._lanes = lanes
        self.noted: list[Crash] = []

    def note(self, instance: str | None = None) -> None:
        """Record that this relay is dead by now; None: the only one that there was."""
        at = time.time()
        self.noted.append(Crash(at, end_leases(self._url, instance)))

    def note_only(self, lanes: Iterable[int]) -> None:
        """Record a relay that is dead and held these lanes, and leave its leases as they are."""
        self.noted.append(Crash(time.time(), frozenset(lanes)))

    def repeats(self, messages: Iterable[Any]) -> list[int]:
        """Return how many events each kill had sent again, by the times at which producers made the messages.

        Fails where that is more than one batch of a lane that the killed relay held, and where something was sent
        twice without a kill.
        """
        found: list[Counter[int]] = [Counter() for _ in self.noted]
        ids: set[bytes] = set()
        for message in messages:
            event_id = dict(message.headers())["ce_id"]
            if event_id not in ids:
                ids.add(event_id)
                continue
            lane = lane_of(self._type, message.key().decode(), self._lanes)
            _, milliseconds = message.timestamp()
            # The last of these: what a relay sends again it has sent when it is killed in turn, or not at all.
            before = [
                number
                for number, crash in enumerate(self.noted)
                if lane in crash.lanes and milliseconds >= int(crash.at * 1000)
            ]
            assert before, (
                f"{event_id!r} of lane {lane} was sent twice, and no relay that held the lane had been killed"
            )
            found[before[-1]][lane] += 1
        for number, lanes in enumerate(found):
            assert max(lanes.values(), default=0) <= self._batch_size, f"kill {number}: {lanes}"
        return [lanes.total() for lanes in found]


class Unsound(AssertionError):
    """The topic is not what the business rows say. ``broken``: the invariants, each with the keys."""

    def __init__(self, broken: dict[Invariant, dict[str, Any]]) -> None:
        super().__init__(broken)
        self.broken = broken


def check(url: str, messages: Iterable[Any]) -> int:
    """Hold the topic against the business rows: nothing lost, nothing invented, in order per key once repeats by event
    id are dropped. Gives the number of repeats. Raises Unsound.
    """
    seen: dict[str, list[int]] = defaultdict(list)
    ids: set[bytes] = set()
    repeats = 0
    for message in messages:
        event_id = dict(message.headers())["ce_id"]
        if event_id in ids:
            repeats += 1
            continue
        ids.add(event_id)
        seen[message.key().decode()].append(json.loads(message.value())["seq"])
    with psycopg.connect(url, autocommit=True) as connection:
        business = dict(connection.execute("SELECT key, seq FROM business").fetchall())
    assert business, "the load wrote nothing"
    found: dict[Invariant, dict[str, Any]] = {
        Invariant.NO_LOSS: {
            key: gone for key, seq in business.items() if (gone := set(range(1, seq + 1)) - set(seen[key]))
        },
        Invariant.NOTHING_LEFT_BEHIND: {key: seqs for key, seqs in seen.items() if len(seqs) > business.get(key, 0)},
        Invariant.ORDER_OF_A_KEY: {key: seqs for key, seqs in seen.items() if seqs != sorted(seqs)},
    }
    if any(found.values()):
        raise Unsound({invariant: keys for invariant, keys in found.items() if keys})
    assert dict(seen) == {key: list(range(1, seq + 1)) for key, seq in business.items()}
    return repeats


def check_at_most_once(url: str, messages: Iterable[Any]) -> int:
    """Hold the topic against the business rows as at-most-once promises: nothing twice, nothing invented. Return the
    number of events that are missing.
    """
    seen: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        seen[message.key().decode()].append(json.loads(message.value())["seq"])
    business = dict(look_up(url, "SELECT key, seq FROM business"))
    twice = {key: seqs for key, seqs in seen.items() if len(seqs) != len(set(seqs))}
    assert twice == {}
    assert {key: seqs for key, seqs in seen.items() if not set(seqs) <= set(range(1, business.get(key, 0) + 1))} == {}
    return sum(business.values()) - sum(map(len, seen.values()))


def said_to_be_lost(relay: RelayProcess) -> int:
    """Return how many events may be lost by what a relay has said, which logs JSON."""
    return sum(line["events"] for line in logged(relay, '"events may be lost'))
