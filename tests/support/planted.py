"""A ``public`` that is open to everybody, as up to Postgres 14, and what an attacker plants there.

For the names of pg_catalog's functions that the product uses, and for its operators, there is one for each combination
of common types that pg_catalog lacks: where arguments of a call need any conversion, the planted one fits better. Each
counts its calls, which survives a rollback, and raises.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

ROOT = Path(__file__).parents[2]
SOURCES = ("outbox", "relay", "spark_jobs", "migrations")
ROLE = "planted_attacker"
LATER = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
PAST = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)

_TYPES = (
    *("text", "varchar", "name", "smallint", "integer", "bigint", "numeric", "double precision", "boolean", "jsonb"),
    *("bytea", "uuid", "timestamptz", "date", "interval", "oid", "regclass", "regprocedure", "xid8", "pg_lsn"),
    *("text[]", "bigint[]", "smallint[]", "uuid[]"),
)
_FEW_TYPES = ("text", "integer", "bigint", "boolean", "smallint", "timestamptz")
_OPERATORS = ("=", "<>", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "||", "->", "->>", "@>", "<@", "&&", "~", "~~")

_CALLED = """
CREATE SCHEMA planted AUTHORIZATION planted_attacker;
GRANT USAGE ON SCHEMA planted TO PUBLIC;
SET LOCAL search_path = pg_catalog;
SET LOCAL ROLE planted_attacker;
CREATE SEQUENCE planted.calls;
CREATE FUNCTION planted.called(what text) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $$
BEGIN
    PERFORM nextval('planted.calls');
    RAISE WARNING 'planted: % as %', what, session_user;
    RAISE EXCEPTION 'planted: % was called by %', what, session_user;
END $$;
"""

# What may stand in place of a function that takes any arguments: the types with which the product calls it.
_ANY_ARGUMENTS = (
    ("format", ("text", "regprocedure", "text")),
    ("format", ("text", "regclass", "text")),
    ("format", ("text", "name", "text")),
    ("format", ("text", "name", "oid", "integer")),
    ("num_nonnulls", ("bigint", "bigint", "timestamptz")),
    ("jsonb_build_object", ("text", "uuid", "text", "text")),
)

_FUNCTIONS = r"""
DO $do$
DECLARE
    one record;
    listed text;
BEGIN
    FOR one IN
        WITH wanted AS (
            SELECT DISTINCT proname, n.n AS arguments, prokind, proretset
              FROM pg_proc, LATERAL generate_series(
                       greatest(pronargs - pronargdefaults - CASE WHEN provariadic <> 0 THEN 1 ELSE 0 END, 1),
                       CASE WHEN provariadic <> 0 THEN greatest(pronargs, 2) ELSE pronargs END) AS n (n)
             WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY({names}) AND n.n <= 3
               AND prokind IN ('f', 'a')),
        arguments AS (
            SELECT proname, prokind, proretset, ARRAY[a]::regtype[] AS types
              FROM wanted, unnest({types}::regtype[]) AS a WHERE arguments = 1
            UNION ALL
            SELECT proname, prokind, proretset, ARRAY[a, b]::regtype[]
              FROM wanted, unnest({types}::regtype[]) AS a, unnest({types}::regtype[]) AS b WHERE arguments = 2
            UNION ALL
            SELECT proname, prokind, proretset, ARRAY[a, b, c]::regtype[]
              FROM wanted, unnest({few}::regtype[]) AS a, unnest({few}::regtype[]) AS b, unnest({few}::regtype[]) AS c
             WHERE arguments = 3)
        SELECT DISTINCT ON (proname, types) proname, types, proretset,
               (SELECT p.prorettype::regtype FROM pg_proc AS p JOIN pg_type AS t ON t.oid = p.prorettype
                 WHERE p.proname = a.proname AND p.pronamespace = 'pg_catalog'::regnamespace AND t.typtype <> 'p'
                 LIMIT 1) AS result
          FROM arguments AS a
         WHERE NOT EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = 'pg_catalog'::regnamespace
                              AND p.proname = a.proname AND p.proargtypes::oid[] = a.types::oid[])
    LOOP
        listed := array_to_string(one.types, ', ');
        EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s%s LANGUAGE plpgsql AS %L', one.proname, listed,
                       CASE WHEN one.proretset THEN 'SETOF ' ELSE '' END,
                       coalesce(one.result::text, one.types[1]::text),
                       format('BEGIN PERFORM planted.called(%L); RETURN%s; END', one.proname || '(' || listed || ')',
                              CASE WHEN one.proretset THEN '' ELSE ' NULL' END));
    END LOOP;
END $do$"""

_OPERATOR_SQL = r"""
DO $do$
DECLARE
    one record;
    made text;
    number integer := 0;
BEGIN
    FOR one IN
        SELECT o, a, b, (SELECT oprresult::regtype FROM pg_operator JOIN pg_type AS t ON t.oid = oprresult
                          WHERE oprname = o AND oprnamespace = 'pg_catalog'::regnamespace AND t.typtype <> 'p' LIMIT 1)
          FROM unnest({operators}::text[]) AS o, unnest({types}::regtype[]) AS a, unnest({types}::regtype[]) AS b
         WHERE NOT EXISTS (SELECT FROM pg_operator WHERE oprname = o AND oprleft = a AND oprright = b
                              AND oprnamespace IN ('pg_catalog'::regnamespace, 'public'::regnamespace))
    LOOP
        number := number + 1;
        made := 'planted.operator_' || {label} || number;
        EXECUTE format('CREATE FUNCTION %s(%s, %s) RETURNS %s LANGUAGE plpgsql AS %L', made, one.a, one.b,
                       coalesce(one.oprresult::text, 'text'),
                       format('BEGIN PERFORM planted.called(%L); RETURN NULL; END',
                              one.a || ' ' || one.o || ' ' || one.b));
        EXECUTE format('CREATE OPERATOR public.%s (FUNCTION = %s, LEFTARG = %s, RIGHTARG = %s)', one.o, made, one.a,
                       one.b);
    END LOOP;
END $do$"""


def open_public(admin: psycopg.Connection[Any]) -> None:
    """Let everybody create in ``public``, as every database did up to Postgres 14, and upgraded ones still do."""
    admin.execute("GRANT CREATE, USAGE ON SCHEMA public TO PUBLIC")


def plant(admin: psycopg.Connection[Any]) -> None:
    """Create functions, operators, tables and views in ``public``, as a role without any rights of its own."""
    if not admin.execute("SELECT FROM pg_roles WHERE rolname = %s", (ROLE,)).rowcount:
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(ROLE)))
    open_public(admin)
    with admin.transaction():
        admin.execute(_CALLED)
        text = "\n".join(file.read_text() for place in SOURCES for file in (ROOT / place).rglob("*.py"))
        values = {
            "names": sql.Literal(sorted(set(re.findall(r"\b[a-z_0-9]+(?=\()", text)))),
            "types": sql.Literal(list(_TYPES)),
            "few": sql.Literal(list(_FEW_TYPES)),
        }
        admin.execute(sql.SQL(_FUNCTIONS).format(**values))
        _plant_operators(admin, _TYPES, "")
        for name, types in _ANY_ARGUMENTS:
            signature = f"{name}({', '.join(types)})"
            admin.execute(
                f"CREATE FUNCTION public.{signature} RETURNS text LANGUAGE plpgsql AS "  # type: ignore[arg-type]
                f"$$ BEGIN PERFORM planted.called('{signature}'); RETURN NULL; END $$"
            )
        for table in ("events", "lanes", "groups", "offsets", "dead_letters", "batch", "alembic_version"):
            admin.execute(
                sql.SQL("CREATE TABLE public.{} (planted text DEFAULT planted.called('a table'))").format(
                    sql.Identifier(table)
                )
            )
        for view in ("pg_class", "pg_namespace", "pg_roles", "pg_settings", "pg_stat_activity", "pg_proc"):
            admin.execute(
                sql.SQL("CREATE VIEW public.{} AS SELECT planted.called('a view') AS oid").format(sql.Identifier(view))
            )


def plant_for(admin: psycopg.Connection[Any], kind: str) -> None:
    """Create operators for a type that is there by now, if pg_catalog has none for exactly this type."""
    with admin.transaction():
        admin.execute("SET LOCAL ROLE planted_attacker")
        _plant_operators(admin, [kind], "more_")


def _plant_operators(admin: psycopg.Connection[Any], kinds: Sequence[str], label: str) -> None:
    values = {"operators": list(_OPERATORS), "types": list(kinds), "label": label}
    literals = {name: sql.Literal(value) for name, value in values.items()}
    admin.execute(sql.SQL(_OPERATOR_SQL).format(**literals))


def calls(admin: psycopg.Connection[Any]) -> int:
    """Return how often something planted was called, whoever called it and whether that was rolled back."""
    row = admin.execute("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM planted.calls").fetchone()
    assert row is not None
    return int(row[0])
