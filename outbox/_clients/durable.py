"""A commit that Postgres can't lose when it stops, whatever the role or the database has set."""

from __future__ import annotations

from typing import Final

SYNCHRONOUS: Final = """pg_catalog.set_config('synchronous_commit',
       CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
            ELSE pg_catalog.current_setting('synchronous_commit') END, true)"""
"""SQL: makes the transaction's COMMIT wait. The setting takes effect there, so any of its statements can have this."""
