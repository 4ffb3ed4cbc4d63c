"""Filters for a host application's ``env.py``: what alembic's autogenerate leaves alone in the outbox's schemas.

    filters = Filters("outbox", "consumer")
    context.configure(…, include_name=filters.include_name, include_object=filters.include_object)

Without them, an autogenerate that looks at all schemas drops the tables that the host's MetaData does not have: all of
them, or with ``outbox_tables(metadata)`` the archive's daily partitions. Alembic is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa

from outbox.event import DEFAULT_SCHEMA

_CONSUMERS: Final = "consumer"


class Filters:
    """Decides what autogenerate reads and compares. Combine them with the host's own filters by ``and``.

    schemas   of outboxes and consumers; "outbox" and "consumer" unless given.
    metadata  the host's, if its own history creates the tables (``outbox_tables(metadata)``): its tables in these
              schemas are compared, and everything else there is left out. Without it everything in these schemas is
              left out: `outbox db upgrade` creates it.
    """

    def __init__(self, *schemas: str, metadata: sa.MetaData | None = None) -> None:
        self._schemas = frozenset(schemas or (DEFAULT_SCHEMA, _CONSUMERS))
        tables = () if metadata is None else metadata.tables.values()
        self._compared = {(table.schema, table.name) for table in tables if table.schema in self._schemas}
        self._looked_at = {schema for schema, _ in self._compared}

    def include_name(self, name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
        """Return whether autogenerate reads this from the database: ``include_name`` of ``context.configure``."""
        if type_ == "schema":
            return name not in self._schemas or name in self._looked_at
        schema = parent_names.get("schema_name")
        if type_ == "table" and schema in self._schemas:
            return (schema, name) in self._compared
        return True

    def include_object(self, object_: Any, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
        """Return whether autogenerate compares this: ``include_object`` of ``context.configure``.

        Excludes tables that are in a MetaData but that `outbox db upgrade` creates: autogenerate would create them.
        """
        del name, reflected, compare_to  # alembic gives them by position
        table = object_ if type_ == "table" else getattr(object_, "table", None)
        if table is None or table.schema not in self._schemas:
            return True
        return (table.schema, table.name) in self._compared
