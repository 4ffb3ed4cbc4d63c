"""Compare the database's tables with those that this version expects.

The expected tables are created in a scratch schema, inside a transaction that is rolled back, and both are read from
pg_catalog. The server prints both sides in its own form, so CHECKs, generated columns, defaults, index predicates and
storage parameters are compared too, which alembic's autogenerate does not do. Unexpected triggers, rules and row
security are differences as well: each can drop events silently.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from outbox._app import migrate as db
from outbox._app.schema_connection import connected
from outbox.consumer.tables import consumer_tables
from outbox.tables import DEFAULT_LANES, MAX_LANES, outbox_tables

# One row for each thing that can differ: (table, kind, name, definition).
_CATALOG: Final = sa.text("""
WITH rel AS (
    SELECT c.oid, c.relname, c.relkind, c.relpersistence, c.reloptions, c.relpartbound, c.relrowsecurity,
           c.relforcerowsecurity, c.relowner
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = :schema AND c.relkind IN ('r', 'p') AND c.relname = ANY(:tables))
SELECT relname, 'table', '', concat_ws(' ',
           CASE relkind WHEN 'p' THEN 'partitioned by ' || pg_get_partkeydef(oid) ELSE 'plain' END,
           CASE relpersistence WHEN 'p' THEN 'logged' ELSE 'not logged' END,
           -- How often a table is vacuumed is up to its operators.
           (SELECT 'with (' || string_agg(o, ', ') || ')' FROM unnest(reloptions) o
             WHERE NOT starts_with(o, 'autovacuum')),
           pg_get_expr(relpartbound, oid))
  FROM rel
UNION ALL
SELECT relname, 'comment', '', obj_description(oid, 'pg_class') FROM rel
 WHERE obj_description(oid, 'pg_class') IS NOT NULL
UNION ALL
SELECT relname, 'row security', '', concat_ws(' ', CASE WHEN relrowsecurity THEN 'enabled' ELSE 'not enabled' END,
           CASE WHEN relforcerowsecurity THEN 'forced on the owner' END)
  FROM rel WHERE relforcerowsecurity OR relrowsecurity
   -- With `outbox db roles --aggregate-type` every role still sees every row.
   AND NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = rel.oid AND polpermissive AND polcmd = '*'
                                           AND polroles = '{0}' AND pg_get_expr(polqual, polrelid) = 'true')
UNION ALL
SELECT rel.relname, 'policy', p.polname, 'may hide rows'
  FROM rel JOIN pg_policy p ON p.polrelid = rel.oid WHERE NOT p.polpermissive AND p.polcmd <> 'a'
UNION ALL
SELECT rel.relname, 'policy', p.polname, 'keeps ' || min(r.rolname) || ' from inserting, which may delete'
  FROM rel JOIN pg_policy p ON p.polrelid = rel.oid AND NOT p.polpermissive AND p.polcmd = 'a'
  JOIN pg_roles r ON NOT r.rolsuper AND NOT r.rolbypassrls AND NOT pg_has_role(r.oid, rel.relowner, 'USAGE')
                 AND rel.relname = 'events' AND has_table_privilege(r.oid, rel.oid, 'DELETE')
 WHERE EXISTS (SELECT FROM unnest(p.polroles) AS hit
                WHERE CASE hit WHEN 0 THEN true ELSE pg_has_role(r.oid, hit, 'USAGE') END)
 GROUP BY rel.relname, p.polname
UNION ALL
SELECT rel.relname, 'trigger', t.tgname, concat_ws(' ', pg_get_triggerdef(t.oid),
           CASE t.tgenabled WHEN 'D' THEN 'disabled' WHEN 'A' THEN 'always' WHEN 'R' THEN 'on replicas' END)
  FROM rel JOIN pg_trigger t ON t.tgrelid = rel.oid AND NOT t.tgisinternal
 -- That of `outbox db ledger on`.
 WHERE NOT (t.tgname = 'outbox_ledger' AND t.tgenabled = 'O'
            AND t.tgfoid = to_regproc(quote_ident(:schema) || '.count_in_ledger'))
UNION ALL
SELECT rel.relname, 'child', format('%I.%I', n.nspname, c.relname), 'a table whose rows no relay publishes'
  FROM rel JOIN pg_inherits i ON i.inhparent = rel.oid AND rel.relkind = 'r'
  JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
UNION ALL
SELECT rel.relname, 'rule', r.rulename, concat_ws(' ', pg_get_ruledef(r.oid),
           CASE r.ev_enabled WHEN 'D' THEN 'disabled' WHEN 'A' THEN 'always' WHEN 'R' THEN 'on replicas' END)
  FROM rel JOIN pg_rewrite r ON r.ev_class = rel.oid
UNION ALL
SELECT rel.relname, 'identity', a.attname, concat_ws(' ', format_type(s.seqtypid, NULL),
           'start', s.seqstart, 'increment', s.seqincrement, 'minvalue', s.seqmin, 'maxvalue', s.seqmax,
           'cache', s.seqcache, CASE WHEN s.seqcycle THEN 'cycle' END)
  FROM rel JOIN pg_attribute a ON a.attrelid = rel.oid AND a.attidentity <> '' AND NOT a.attisdropped
  JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = rel.oid AND d.refobjsubid = a.attnum
                  AND d.classid = 'pg_class'::regclass AND d.deptype = 'i'
  JOIN pg_sequence s ON s.seqrelid = d.objid
UNION ALL
SELECT rel.relname, 'column', a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod),
           CASE WHEN a.attcollation <> t.typcollation THEN 'collate ' || a.attcollation::regcollation END,
           CASE WHEN a.attnotnull THEN 'not null' END,
           CASE a.attidentity WHEN 'a' THEN 'identity always' WHEN 'd' THEN 'identity by default' END,
           CASE a.attgenerated WHEN 's' THEN 'generated stored' WHEN 'v' THEN 'generated virtual' END,
           pg_get_expr(d.adbin, d.adrelid))
  FROM rel JOIN pg_attribute a ON a.attrelid = rel.oid AND a.attnum > 0 AND NOT a.attisdropped
  JOIN pg_type t ON t.oid = a.atttypid
  LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
UNION ALL
SELECT rel.relname, 'constraint', c.conname, concat_ws(' ', pg_get_constraintdef(c.oid),
           CASE WHEN NOT c.convalidated THEN 'not validated' END)
  FROM rel JOIN pg_constraint c ON c.conrelid = rel.oid AND c.contype <> 'n'
UNION ALL
SELECT rel.relname, 'index', i.relname, concat_ws(' ', pg_get_indexdef(x.indexrelid),
           CASE WHEN NOT x.indisvalid THEN 'invalid' END)
  FROM rel JOIN pg_index x ON x.indrelid = rel.oid JOIN pg_class i ON i.oid = x.indexrelid""")

Things = dict[tuple[str, str, str], str]


@dataclass(frozen=True, slots=True)
class Drift:
    """How the tables differ from this version's.

    differences  one line for each.
    later        whether a later version made them: this one runs with them as they are.
    """

    differences: list[str]
    later: bool = False


def drift(url: str, schema: str = "outbox") -> Drift:
    """Compare the outbox's tables with this version's.

    Needs the right to create a schema in the database; it is rolled back. Raises ConfigurationError for an invalid
    schema name, SchemaError when a query fails.
    """
    with _connection(url, schema) as connection:
        lanes = _lane_rows(connection, schema)
        expected_lanes = min(max(lanes[-1] + 1, 1), MAX_LANES) if lanes else DEFAULT_LANES
        found = _compare(
            connection, schema, db.OUTBOX, lambda metadata, at: outbox_tables(metadata, at, expected_lanes).all
        )
        if not found.differences and lanes != list(range(len(lanes))):
            found.differences.append(f"{schema}.lanes: has the lanes {lanes}, and not 0 to {lanes[-1]}")
        if not found.differences and not lanes:
            found.differences.append(
                f"{schema}.lanes: has no rows; insert the lanes 0 to N-1, or run `outbox db upgrade`"
            )
        return found


def check(url: str, schema: str = "outbox") -> list[str]:
    """Return the differences that ``drift`` finds, and raise as it does."""
    return drift(url, schema).differences


def check_consumer(url: str, schema: str) -> list[str]:
    """Compare the consumers' tables with this version's, as ``check`` does."""
    with _connection(url, schema) as connection:
        return _compare(connection, schema, db.CONSUMER, consumer_tables).differences


def _compare(
    connection: sa.Connection, schema: str, history: db.History, build: Callable[[sa.MetaData, str], Sequence[sa.Table]]
) -> Drift:
    # The server omits a schema that is on the search path, and only one of the two could be on it.
    connection.execute(sa.select(sa.func.set_config("search_path", "", True)))
    scratch = f"outbox_check_{secrets.token_hex(8)}"
    metadata = sa.MetaData()
    tables = [table.name for table in build(metadata, scratch)]
    connection.execute(sa.schema.CreateSchema(scratch))
    metadata.create_all(connection)
    # The preparer doubles a % for the driver; the catalog has it once.
    quoted = connection.dialect.identifier_preparer.quote_schema(schema).replace("%%", "%")
    expected = {
        key: definition.replace(scratch, quoted) for key, definition in _read(connection, scratch, tables).items()
    }
    lines = differences(expected, _read(connection, schema, tables), schema)
    # A host application that created the tables in its own history has no version table here, or one of its own.
    there = db.current(connection, schema)
    if there is not None:
        known = db.revisions(history)
        head, foreign = known[-1], db.not_ours(there, known, schema)
        if foreign is not None and head not in there:
            lines += [foreign] if lines else []
        elif later := db.of_later_version(there, known):
            lines.append(f"{schema}.alembic_version: is at {later}, of a later version than this one, which has {head}")
            return Drift(lines, later=True)
        elif head not in there:
            lines.append(f"{schema}.alembic_version: is at {', '.join(there) or 'no revision'}, expected {head}")
    return Drift(lines)


def differences(expected: Mapping[tuple[str, str, str], str], found: Things, schema: str) -> list[str]:
    """Return one line for each difference of the two catalogs."""
    lines = []
    missing = {table for table, kind, _ in expected if kind == "table"} - {t for t, kind, _ in found if kind == "table"}
    lines += [f"{schema}.{table}: the table is missing" for table in sorted(missing)]
    for key in sorted(expected.keys() | found.keys()):
        table, kind, name = key
        if table in missing:
            continue
        shown = f"{schema}.{table}: {kind} {name}".rstrip()
        if key not in found:
            lines.append(f"{shown} is missing: {expected[key]}")
        elif key not in expected:
            lines.append(f"{shown} is not expected: {found[key]}")
        elif expected[key] != found[key]:
            lines.append(f"{shown} is {found[key]!r}, expected {expected[key]!r}")
    return lines


def _read(connection: sa.Connection, schema: str, tables: list[str]) -> Things:
    rows = connection.execute(_CATALOG, {"schema": schema, "tables": tables})
    return {(table, kind, name): definition for table, kind, name, definition in rows}


def _lane_rows(connection: sa.Connection, schema: str) -> list[int]:
    inspector = sa.inspect(connection)
    if not inspector.has_table("lanes", schema=schema):
        return []
    if "lane" not in {column["name"] for column in inspector.get_columns("lanes", schema=schema)}:
        return []
    lane = sa.cast(sa.table("lanes", sa.column("lane"), schema=schema).c.lane, sa.Integer)
    return list(connection.execute(sa.select(lane).order_by(lane)).scalars())


@contextmanager
def _connection(url: str, schema: str) -> Iterator[sa.Connection]:
    """Open a connection whose transaction is always rolled back. Raises ConfigurationError for a schema's name."""
    db.check_name(schema)
    with connected(url) as connection:
        yield connection
        connection.rollback()
