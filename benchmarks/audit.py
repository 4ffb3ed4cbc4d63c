"""Measure what `outbox audit` takes, and what `outbox audit --follow` takes from the relay beside it.

    python benchmarks/audit.py [--events N] [--rounds N] [--only audit|follow]

On a Postgres and a broker of its own. The audit is of an hour with so many events, once with the archive and once with
the ledger: when all is equal, and when one event of one minute differs. For the relay's rate, a backlog of so many
events is drained while the audit follows minutes of 30,000 events each: with it and without it, in changing order.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# This file is called like the command that it measures: the folder above comes first.
sys.path.insert(0, str(Path(__file__).parents[1]))

import orjson

from benchmarks.harness.load import SMALL, Backlog, fill, pad, wait_until_empty
from benchmarks.harness.publishers import Publisher, publishing
from benchmarks.harness.relays import ours
from benchmarks.harness.servers import BenchError, Servers, Site, wait_until
from benchmarks.harness.topic import read_back

_TOGETHER: Final = 10_000
_A_MINUTE: Final = 30_000
_SECONDS: Final = 900.0
_HOUR: Final = 3600
_OVER_SECONDS: Final = 360
# More than an hour: writing and auditing take their time, too.
_SINCE: Final = dt.timedelta(hours=12)
# Numbers from a million million on: those of a backlog are below.
_INSERT: Final = """
INSERT INTO outbox.events (event_id, aggregate_type, aggregate_id, event_type, payload)
SELECT uuidv7(make_interval(secs => -%s::float8 - %s::float8 * (%s - n) / %s)), %s, 'order-' || n %% 5000,
       'OrderPlaced', jsonb_build_object('n', 1000000000000 + n, 'pad', (%s::text[])[1 + n %% 100])
  FROM generate_series(%s::int, %s::int) AS n"""
# The archive has been on for long.
_BEFORE: Final = """
INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at, published_at)
SELECT 0, 0, gen_random_uuid(), 'Before', 'k', 'E', now() - interval '1 day', now() - interval '1 day'"""
_ONE: Final = {
    "archive": "UPDATE outbox.published SET payload = '{}' WHERE event_id ="
    " (SELECT event_id FROM outbox.published WHERE id > 0 ORDER BY event_id OFFSET 1000 LIMIT 1)",
    "ledger": "UPDATE outbox.ledger SET events = events + 1 WHERE ctid = (SELECT min(ctid) FROM outbox.ledger)",
}
# A process begins with the memory of the one that starts it, which is small then.
_MEASURED: Final = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss, used.ru_utime + used.ru_stime, file=sys.stderr)"""


def written(site: Site, relay: Publisher, count: int, span: float, ago: float) -> None:
    """Write events with ids of ``span`` seconds up to so long ``ago``, and publish them."""
    relay.start()
    pads = [pad(SMALL) for _ in range(100)]
    with site.connect() as connection:
        connection.execute(_BEFORE)
        for first in range(1, count + 1, _TOGETHER):
            last = min(first + _TOGETHER - 1, count)
            connection.execute(_INSERT, (ago, span, count, count, site.kind, pads, first, last))
    wait_until_empty(site, _SECONDS)
    relay.halt()


def audited(site: Site, count: int, differences: int) -> str:
    """Audit in a process of its own. Returns what it took."""
    since = dt.datetime.now(dt.UTC) - _SINCE
    command = [sys.executable, "-m", "relay.cli", "audit", "--json", "--since", f"{since:%Y-%m-%dT%H:%M:%S}"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *command],
        env=site.environment(),
        cwd=site.folder,
        capture_output=True,
        check=True,
    )
    seconds = time.monotonic() - began
    found, (memory, cpu) = orjson.loads(done.stdout), map(float, done.stderr.split()[-2:])
    there = sum(one["kafka"] for one in found["windows"]), found["differences_count"]
    if there != (count, differences):
        raise BenchError(f"the audit found {there} events and differences, not {(count, differences)}")
    return f"{seconds:.1f} s, of which {cpu:.1f} s of CPU are its own, and {memory / 1024:.0f} MB"


def audits(servers: Servers, kept: str, count: int) -> None:
    """Print what the audits of an hour take, with the archive or the ledger."""
    servers.settings["relay__archive_days"] = str(int(kept == "archive"))
    way = ours("polling", "at-least-once")
    with servers.site(f"audit-{kept}") as site, publishing(way, servers, site) as relay:
        if kept == "ledger":
            site.outbox("db", "ledger", "on")
            with site.connect() as connection:
                connection.execute("UPDATE outbox.ledger_state SET since = since - interval '1 day'")
        written(site, relay, count, _HOUR, _OVER_SECONDS)
        with site.connect() as connection:
            if kept == "ledger":
                connection.execute("DELETE FROM outbox.published")
            connection.execute("VACUUM ANALYZE")
            for differences, change in enumerate(("SELECT", _ONE[kept])):
                connection.execute(change.encode())
                print(f"{kept}, {differences} of {count:,} differ: {audited(site, count, differences)}", flush=True)


@contextlib.contextmanager
def following(site: Site) -> Iterator[None]:
    """Follow beside what is in the block, which begins when the first minutes have been compared."""
    since = dt.datetime.now(dt.UTC) - _SINCE
    command = [sys.executable, "-m", "relay.cli", "audit", "--follow", "--since", f"{since:%Y-%m-%dT%H:%M:%S}"]
    with (site.folder / "follow.log").open("wb") as log:
        process = subprocess.Popen(command, env=site.environment(), cwd=site.folder, stdout=log, stderr=log)
        try:
            wait_until(lambda: site.value("SELECT count(*) FROM outbox.verified") > 0, "the first minutes", _SECONDS)
            yield
        finally:
            process.terminate()
            process.wait()


def rate(servers: Servers, count: int, *, follow: bool) -> float:
    """Return how many events a second the relay publishes of a backlog."""
    servers.settings["relay__archive_days"] = "1"
    way = ours("polling", "at-least-once")
    with servers.site("follow") as site, publishing(way, servers, site) as relay:
        written(site, relay, 8 * _A_MINUTE, 8 * 60, 0)
        fill(site, Backlog(count, together=1000))
        with following(site) if follow else contextlib.nullcontext():
            relay.start()
            wait_until_empty(site, _SECONDS)
        return read_back(site, 0, count).rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["audit", "follow"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Servers(Path(folder)) as servers:
        if given.only != "follow":
            for kept in ("archive", "ledger"):
                audits(servers, kept, given.events)
        if given.only != "audit":
            ratios = []
            for number in range(given.rounds):
                rates = {
                    follow: rate(servers, given.events, follow=follow) for follow in (number % 2 > 0, number % 2 < 1)
                }
                ratios.append(rates[True] / rates[False])
                print(f"{rates[False]:,.0f} events/s, with --follow {rates[True]:,.0f}: {ratios[-1]:.3f}", flush=True)
            print(f"the relay's rate beside --follow: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
