"""Writers that may insert events of some aggregate types only, by row security.

A permissive policy for everyone leaves every row to every role; a restrictive one takes from a writer's INSERT what it
may not write (https://www.postgresql.org/docs/current/ddl-rowsecurity.html). The owner of the tables, superusers and
roles with BYPASSRLS are above row security, so they are refused here; and so is a role that could act as another one
that inserts. `outbox db check` knows these policies, and reports any that hides rows or hits a relay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from psycopg import sql

from outbox.errors import ConfigurationError
from relay.operations.roles import TAG, RoleKind

_TABLES: Final = ("events", "scheduled", "idempotency_keys")
_OPEN: Final = "rights decide"
"""The permissive policy's name. A restrictive one has its role's."""

# One statement, and so one transaction, a table: services lock these tables in any order. Nothing is locked where the
# policies are as wanted.
_LIMIT: Final = """DO {tag}
DECLARE
    of_table oid := {table_name}::pg_catalog.regclass::oid;
    of_role oid := {role_name}::pg_catalog.regrole::oid;
    wanted text := {wanted};
    there record;
    another text;
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_roles WHERE oid = of_role AND (rolsuper OR rolbypassrls))
       OR EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = of_table AND relowner = of_role) THEN
        RAISE EXCEPTION 'role % can not be limited: it is the owner of %, a superuser, or has BYPASSRLS',
                        {role_text}, {table_name};
    END IF;
    SELECT rolname INTO another FROM pg_catalog.pg_roles
     WHERE oid <> of_role AND pg_catalog.pg_has_role(of_role, oid, 'MEMBER')
       AND pg_catalog.has_any_column_privilege(oid, of_table, 'INSERT') LIMIT 1;
    IF another IS NOT NULL THEN
        RAISE EXCEPTION 'role % can not be limited: as a member of % it can insert into % what that role can',
                        {role_text}, another, {table_name};
    END IF;
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_policy
                    WHERE polrelid = of_table AND polname = {open_text}::pg_catalog.name) THEN
        CREATE POLICY {open} ON {table} USING (true) WITH CHECK (true);
    END IF;
    SELECT polroles[1] AS of_whom, pg_catalog.pg_get_expr(polwithcheck, polrelid) AS checked INTO there
      FROM pg_catalog.pg_policy WHERE polrelid = of_table AND polname = {role_text}::pg_catalog.name;
    IF there.of_whom <> of_role THEN
        RAISE EXCEPTION 'policy % on % belongs to another role; drop or rename it first', {role_text}, {table_name};
    END IF;
    IF there.checked IS DISTINCT FROM wanted THEN
        DROP POLICY IF EXISTS {role} ON {table};
        CREATE POLICY {role} ON {table} AS RESTRICTIVE FOR INSERT TO {role} WITH CHECK {check};
    END IF;
    IF EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = of_table AND NOT relrowsecurity) THEN
        ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;
    END IF;
END {tag}"""


def limits(
    roles: Sequence[tuple[RoleKind, str]], schema: str, aggregate_types: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield a statement for each table and limited writer, to be executed one by one, before the role gets rights.

    ``aggregate_types`` has by the role's name the only aggregate types of which it may insert events. Raises
    ConfigurationError for a role that is not a writer, or is a relay or an operator too: these insert every type.
    """
    for role, types in aggregate_types.items():
        kinds = {kind for kind, name in roles if name == role and not kind.of_sink}
        if RoleKind.WRITER not in kinds or not kinds <= {RoleKind.WRITER, RoleKind.CANCELLER}:
            raise ConfigurationError(
                f"aggregate types limit a writer: name writer={role} as well, and no other kind of the outbox's schema "
                "but canceller"
            )
        if role == _OPEN:
            raise ConfigurationError(f"a role that is called {role!r} can't be limited: a policy has this name")
        # As Postgres prints it, so that an equal policy is recognized.
        listed = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Literal(name)) for name in types)
        check = sql.SQL("(aggregate_type = ANY (ARRAY[{}]))").format(listed)
        for name in _TABLES:
            table, identifier = sql.Identifier(schema, name), sql.Identifier(role)
            yield (
                sql.SQL(_LIMIT)
                .format(
                    tag=sql.SQL(TAG),
                    table=table,
                    table_name=sql.Literal(table.as_string()),
                    role=identifier,
                    role_name=sql.Literal(identifier.as_string()),
                    role_text=sql.Literal(role),
                    open=sql.Identifier(_OPEN),
                    open_text=sql.Literal(_OPEN),
                    check=check,
                    wanted=sql.Literal(check.as_string()),
                )
                .as_string()
            )
