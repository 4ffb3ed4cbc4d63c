"""Which minutes are over: no transaction that is open may still bring events of them."""

from __future__ import annotations

import time
from typing import Any, Final

import psycopg

from relay.audit.sums import minute_of
from relay.database import unavailable_on_error

LATE_MINUTES: Final = 5
"""How many minutes an event's transaction may take before its first write, and how far clocks may be apart."""

_WAIT_SECONDS: Final = 5.0

# A transaction number of our own: transactions that have one by now have a lower one, or they began later.
_BEGUN: Final = "SELECT clock_timestamp(), pg_current_xact_id()::text::bigint"
# A snapshot has the open transactions of all databases. Each role sees the numbers and databases of all sessions.
_OLDEST: Final = """
SELECT coalesce(min(number::text::bigint), pg_snapshot_xmax(pg_current_snapshot())::text::bigint)
  FROM pg_snapshot_xip(pg_current_snapshot()) AS number
 WHERE number::xid NOT IN (
       SELECT backend_xid FROM pg_stat_activity WHERE datname <> current_database() AND backend_xid IS NOT NULL
       UNION ALL SELECT transaction FROM pg_prepared_xacts WHERE database <> current_database())"""

# NULL where it is not known: what other roles' sessions do is shown to members of pg_read_all_stats only, and since
# when one is prepared to none.
_OPEN: Final = """
SELECT xact_start FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND (backend_xid IS NOT NULL OR query = '<insufficient privilege>')
 UNION ALL
SELECT NULL FROM pg_prepared_xacts WHERE database = current_database()"""


class Transactions:
    """Looks again and again which transactions have ended."""

    def __init__(self) -> None:
        # Minutes that had begun, each with the number of a transaction then.
        self._begun: list[tuple[int, int]] = []

    @property
    def first(self) -> int:
        """The minute of the first look of which it is not known that its transactions have ended."""
        return self._begun[0][0]

    def closed(self, connection: psycopg.Connection[Any]) -> int:
        """Return the first minute that is not over; 0 if none is known to be. Raises Unavailable."""
        with unavailable_on_error("looking for the minutes that are over"):
            cursor = psycopg.Cursor(connection)
            ((now, number),) = cursor.execute(_BEGUN).fetchall()
            ((oldest,),) = cursor.execute(_OLDEST).fetchall()
        self._begun.append((minute_of(now), number))
        ended = [begun for begun, number in self._begun if number <= oldest]
        if not ended:
            return 0
        self._begun = [one for one in self._begun if one[0] >= ended[-1]]
        return ended[-1] - LATE_MINUTES


def closed_now(connection: psycopg.Connection[Any]) -> tuple[int, str | None]:
    """Return the first minute that is not over, and if that is long ago, why.

    Waits a little for transactions that are open. Raises Unavailable.
    """
    transactions, until = Transactions(), time.monotonic() + _WAIT_SECONDS
    with unavailable_on_error("looking for open transactions"):
        cursor = psycopg.Cursor(connection)
        ((standby,),) = cursor.execute("SELECT pg_is_in_recovery()").fetchall()
        if standby:
            return 0, "this server is a standby: no minute is known to be over"
        while not (minute := transactions.closed(connection)):
            if time.monotonic() > until:
                begun = [since for (since,) in cursor.execute(_OPEN).fetchall()]
                if not begun:
                    # Those that are open are of other databases.
                    return transactions.first - LATE_MINUTES, None
                if None in begun:
                    why = "no minute is known to be over: a transaction is open, and this role does not see since when"
                    return 0, f"{why} (pg_read_all_stats), or it is a prepared one"
                since = min(begun)
                why = f"a transaction is open since {since:%Y-%m-%d %H:%M:%S %Z}, and may still bring events"
                return minute_of(since) - LATE_MINUTES, why
            time.sleep(0.1)
    return minute, None
