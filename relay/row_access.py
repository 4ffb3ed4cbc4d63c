"""Whether a role sees, and may delete, every row of the tables that hold unpublished events.

Where it does not, Postgres reports no error: a relay would be ready and publish nothing, or the same events again and
again. The catalogs are readable by every role.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from relay.core.ports import StandingError

# One plain table: statements on it say ONLY, because a ctid is the place of a row in one heap.
# Row security: policies are or'ed if permissive, and and'ed if restrictive. `outbox db roles --aggregate-type` makes a
# permissive one that leaves every row to every role. A DELETE obeys those for SELECT as well, and so does FOR UPDATE,
# with which scheduled events are moved.
_FOUND: Final = """
WITH kept AS (
    SELECT c.oid, c.relname, c.relkind, c.relowner, c.relrowsecurity, c.relforcerowsecurity
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname = %(schema)s AND c.relname IN ('events', 'scheduled'))
SELECT relname::text, 'kind', NULL FROM kept WHERE relkind <> 'r'
UNION ALL
SELECT relname, 'child', i.inhrelid::regclass::text FROM kept JOIN pg_inherits AS i ON i.inhparent = oid
 WHERE relkind = 'r'
UNION ALL
SELECT relname, 'hidden', r.rolname
  FROM kept JOIN pg_roles AS r ON {roles}
 WHERE relrowsecurity AND NOT (r.rolsuper OR r.rolbypassrls)
   AND (relforcerowsecurity OR NOT pg_has_role(r.oid, relowner, 'USAGE'))
   AND EXISTS (
       SELECT FROM (VALUES ('r', ''), ('d', ''), ('w', 'scheduled')) AS needed(command, of_table)
         LEFT JOIN pg_policy AS p ON polrelid = kept.oid AND polcmd::text IN ('*', command)
               AND EXISTS (SELECT FROM unnest(polroles) AS whose
                            WHERE CASE whose WHEN 0 THEN true ELSE pg_has_role(r.oid, whose, 'USAGE') END)
        WHERE of_table IN ('', relname)
        GROUP BY command
       HAVING NOT coalesce(bool_or(polpermissive AND pg_get_expr(polqual, polrelid) = 'true'), false)
           OR bool_or(NOT polpermissive AND pg_get_expr(polqual, polrelid) <> 'true'))
 ORDER BY 1, 2, 3"""
_OWN: Final = "r.rolname = current_user"
# Those that settle: the relays' roles, and the operators'.
_MAY_DELETE: Final = """r.rolname = current_user
        OR r.rolcanlogin AND relname = 'events' AND has_table_privilege(r.oid, kept.oid, 'DELETE')"""


def row_problems(
    connection: psycopg.Connection[Any], schema: str, *, every_role: bool = False
) -> Sequence[tuple[str, str]]:
    """Return what is wrong for this session's role, or with ``every_role`` for all that may delete events.

    Each with what to do about it.
    """
    roles: LiteralString = _MAY_DELETE if every_role else _OWN
    rows = connection.execute(sql.SQL(_FOUND).format(roles=sql.SQL(roles)), {"schema": schema}).fetchall()
    return [_problem(sql.Identifier(schema, table).as_string(), kind, name) for table, kind, name in rows]


def require_all_rows(connection: psycopg.Connection[Any], schema: str) -> None:
    """Raise StandingError if this session's role would miss rows of unpublished events, or rows would stay."""
    if problems := row_problems(connection, schema):
        raise StandingError("; ".join(f"{found}: {do}" for found, do in problems))


def _problem(table: str, kind: str, name: str) -> tuple[str, str]:
    match kind:
        case "kind":
            return f"{table} is partitioned, or no table", "make it a plain table, as `outbox db sql` has it"
        case "child":
            found = f"{table} has the child table {name}, whose rows no relay publishes"
            return found, f"ALTER TABLE {name} NO INHERIT {table}"
        case _:
            policy = f"CREATE POLICY every_row ON {table} TO {sql.Identifier(name).as_string()}"
            do = f"{policy} USING (true) WITH CHECK (true), and restrict neither its SELECT nor its DELETE"
            return f"row security of {table} may hide rows from role {name}", do
