"""Drift: does the database hold the tables that this version expects?

The expected tables are created in a scratch schema, inside a transaction that is rolled back, and both are read from
pg_catalog. So the server itself prints both sides in its own form: CHECKs, generated columns, defaults, index
predicates and storage parameters are compared too, which alembic's autogenerate does not do.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa

from outbox.errors import SchemaError
from outbox.tables import DEFAULT_LANES, MAX_LANES, outbox_tables
from outbox.urls import display_url, sqlalchemy_url

# One row for each thing that can differ: (table, kind, name, definition).
_CATALOG: Final = sa.text("""
WITH rel AS (
    SELECT c.oid, c.relname, c.relkind, c.relpersistence, c.reloptions, c.relpartbound
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = :schema AND c.relkind IN ('r', 'p') AND c.relname = ANY(:tables))
SELECT relname, 'table', '', concat_ws(' ',
           CASE relkind WHEN 'p' THEN 'partitioned by ' || pg_get_partkeydef(oid) ELSE 'plain' END,
           CASE relpersistence WHEN 'p' THEN 'logged' ELSE 'not logged' END,
           'with (' || array_to_string(reloptions, ', ') || ')', pg_get_expr(relpartbound, oid))
  FROM rel
UNION ALL
SELECT relname, 'comment', '', obj_description(oid, 'pg_class') FROM rel
 WHERE obj_description(oid, 'pg_class') IS NOT NULL
UNION ALL
SELECT rel.relname, 'column', a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod),
           CASE WHEN a.attnotnull THEN 'not null' END,
           CASE a.attidentity WHEN 'a' THEN 'identity always' WHEN 'd' THEN 'identity by default' END,
           CASE a.attgenerated WHEN 's' THEN 'generated stored' WHEN 'v' THEN 'generated virtual' END,
           pg_get_expr(d.adbin, d.adrelid))
  FROM rel JOIN pg_attribute a ON a.attrelid = rel.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
UNION ALL
SELECT rel.relname, 'constraint', c.conname, concat_ws(' ', pg_get_constraintdef(c.oid),
           CASE WHEN NOT c.convalidated THEN 'not validated' END)
  FROM rel JOIN pg_constraint c ON c.conrelid = rel.oid AND c.contype <> 'n'
UNION ALL
SELECT rel.relname, 'index', i.relname, concat_ws(' ', pg_get_indexdef(x.indexrelid),
           CASE WHEN NOT x.indisvalid THEN 'invalid' END)
  FROM rel JOIN pg_index x ON x.indrelid = rel.oid JOIN pg_class i ON i.oid = x.indexrelid""")

Build = Callable[[sa.MetaData, str], Sequence[sa.Table]]
Things = dict[tuple[str, str, str], str]


def check(url: str, schema: str = "outbox") -> list[str]:
    """Compare the outbox's tables with this version's. Gives one line for each difference; none means all is well.

    Needs the right to create a schema in the database, for the moment of the comparison. Raises SchemaError when the
    database can't be asked.
    """
    with _connection(url) as connection:
        lanes = _lane_rows(connection, schema)
        expected_lanes = min(lanes[-1] + 1, MAX_LANES) if lanes else DEFAULT_LANES
        differences = _compare(
            connection,
            schema,
            lambda metadata, scratch: outbox_tables(metadata, scratch, expected_lanes).all,
        )
        if not differences and lanes != list(range(len(lanes))):
            differences.append(f"{schema}.lanes: has the lanes {lanes}, and not 0 to {lanes[-1]}")
        if not differences and not lanes:
            differences.append(f"{schema}.lanes: has no rows; insert the lanes 0 to N-1, or run `outbox db upgrade`")
        return differences


def check_tables(url: str, schema: str, build: Build) -> list[str]:
    """Compare any tables with what ``build`` puts into a MetaData for a schema. Gives one line for each difference."""
    with _connection(url) as connection:
        return _compare(connection, schema, build)


def _compare(connection: sa.Connection, schema: str, build: Build) -> list[str]:
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
    return differences(expected, _read(connection, schema, tables), schema)


def differences(expected: Mapping[tuple[str, str, str], str], found: Things, schema: str) -> list[str]:
    """Say in words how the two differ."""
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
    if not sa.inspect(connection).has_table("lanes", schema=schema):
        return []
    lane = sa.table("lanes", sa.column("lane"), schema=schema).c.lane
    return list(connection.execute(sa.select(lane).order_by(lane)).scalars())


@contextmanager
def _connection(url: str) -> Iterator[sa.Connection]:
    """A connection whose transaction is always rolled back."""
    engine = sa.create_engine(sqlalchemy_url(url), poolclass=sa.pool.NullPool)
    try:
        with engine.connect() as connection:
            yield connection
            connection.rollback()
    except sa.exc.DBAPIError as error:
        first_line = str(error.orig).strip().partition("\n")[0]
        raise SchemaError(f"{display_url(url)}: {first_line}") from error
    finally:
        engine.dispose()
