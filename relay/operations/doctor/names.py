"""The doctor's checks of names: what tables of ours call outside of pg_catalog, and where everybody may create."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import psycopg

from outbox._clients.checks import Check, Finding, failure, warning

# Defaults and generated columns, constraints, indexes, triggers, rules and policies. pg_depend has no rows for what
# initdb has made.
_CALLED: Final = """
WITH ours AS (
    SELECT c.oid, c.relname, c.relowner FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'p')),
parts AS (
    SELECT 'pg_attrdef'::regclass AS class, d.oid AS part_oid, relname, relowner, 'column ' || a.attname AS part
      FROM ours JOIN pg_attrdef AS d ON d.adrelid = ours.oid
      JOIN pg_attribute AS a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
    UNION ALL
    SELECT 'pg_constraint'::regclass, c.oid, relname, relowner, 'constraint ' || c.conname
      FROM ours JOIN pg_constraint AS c ON c.conrelid = ours.oid
    UNION ALL
    SELECT 'pg_class'::regclass, x.indexrelid, ours.relname, ours.relowner, 'index ' || i.relname
      FROM ours JOIN pg_index AS x ON x.indrelid = ours.oid JOIN pg_class AS i ON i.oid = x.indexrelid
    UNION ALL
    SELECT 'pg_trigger'::regclass, t.oid, relname, relowner, 'trigger ' || t.tgname
      FROM ours JOIN pg_trigger AS t ON t.tgrelid = ours.oid AND NOT t.tgisinternal
    UNION ALL
    SELECT 'pg_rewrite'::regclass, r.oid, relname, relowner, 'rule ' || r.rulename
      FROM ours JOIN pg_rewrite AS r ON r.ev_class = ours.oid
    UNION ALL
    SELECT 'pg_policy'::regclass, p.oid, relname, relowner, 'policy ' || p.polname
      FROM ours JOIN pg_policy AS p ON p.polrelid = ours.oid),
foreign_ones AS (
    SELECT 'pg_proc'::regclass AS class, oid, oid::regprocedure::text AS called, pronamespace AS namespace,
           proowner AS owner FROM pg_proc
    UNION ALL
    SELECT 'pg_operator'::regclass, oid, 'operator ' || oid::regoperator::text, oprnamespace, oprowner
      FROM pg_operator)
SELECT DISTINCT parts.relname, parts.part, f.called, r.rolname, f.owner <> parts.relowner AND NOT r.rolsuper,
                pg_get_userbyid(parts.relowner)
  FROM parts JOIN pg_depend AS d ON d.classid = parts.class AND d.objid = parts.part_oid
  JOIN foreign_ones AS f ON f.class = d.refclassid AND f.oid = d.refobjid
  JOIN pg_roles AS r ON r.oid = f.owner
 WHERE f.namespace <> 'pg_catalog'::regnamespace
 ORDER BY 1, 2, 3"""

_OPEN: Final = """
SELECT quote_ident(nspname) FROM pg_namespace
 WHERE nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%' AND has_schema_privilege('public', oid, 'CREATE')
 ORDER BY 1"""


def checks(connection: psycopg.Connection[Any], schema: str, all_schemas: str | None) -> Iterator[Check]:
    """Return the check of what a schema's tables call, and one named ``all_schemas`` of where everybody may create."""
    yield Check("names", lambda: connection.execute(_CALLED, {"schema": schema}).fetchall(), partial(_calls, schema))
    if all_schemas is not None:
        yield Check(all_schemas, lambda: connection.execute(_OPEN).fetchall(), _open_schemas)


def _calls(schema: str, rows: Iterable[tuple[str, str, str, str, bool, str]]) -> Iterator[Finding]:
    """Name the functions and operators outside of pg_catalog that tables of a schema call: as everybody who writes."""
    for table, part, called, owner, others, tables_owner in rows:
        if part == "trigger outbox_ledger" and called.endswith("count_in_ledger()"):
            # That of `outbox db ledger on`, which has the rights of its owner.
            if owner != tables_owner:
                yield failure(
                    f"{schema}.{table}",
                    f"its {part} calls {called} with the rights of {owner}, which is not the tables' owner: every "
                    "INSERT fails, or the tables' owner can act with these rights",
                    f"`outbox db roles migrator={tables_owner} --apply`, as a superuser",
                )
            continue
        yield (failure if others else warning)(
            f"{schema}.{table}",
            f"its {part} calls {called}, which belongs to {owner} and is not in pg_catalog: it runs with the rights of "
            "whoever writes here",
            "if it was planted, recreate that part with `SET search_path = pg_catalog` (the column lane: `outbox db "
            f"lanes`), drop the function, and check what else {owner} has created; see `outbox db check`",
        )


def _open_schemas(rows: Iterable[tuple[str]]) -> Iterator[Finding]:
    """Name the schemas in which everybody may create, as in ``public`` up to Postgres 14 and after an upgrade."""
    for (name,) in rows:
        yield warning(
            f"schema {name}",
            "every role may create in it, and so plant functions that others with it in their search path call instead "
            "of Postgres's. The outbox's own sessions don't use it",
            f"REVOKE CREATE ON SCHEMA {name} FROM PUBLIC",
        )
