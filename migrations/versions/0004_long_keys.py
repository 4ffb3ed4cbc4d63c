"""Indexes over a hash of the key: a btree takes rows of 2,704 bytes, and a key may have 4,000.

Locks: writes to ``failures`` and to ``published`` with all its partitions wait from the beginning to the end, and reads
of them for a moment at the end; writers of events wait for nothing. The indexes of the archive are built meanwhile, in
a second or a few for a million events. Relays wait for that long with what they have published, and go on afterwards.
An archive that is too large for such a pause can have the index built on each of its partitions beforehand, while
everything runs (``CREATE INDEX CONCURRENTLY ON … (aggregate_type, hashtextextended(aggregate_id, 0))``): this revision
takes over those that it finds. Relays of the version before work with these indexes too, and relays of this one without
them; both are slower while a lane has thousands of failures.

Going back is refused while a key is there that the old indexes have no room for.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "outbox_0004"
down_revision = "outbox_0003"
branch_labels = None
depends_on = None

_HASH = "hashtextextended(aggregate_id, 0)"


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    _hold_back(schema)
    hashed = sa.text(_HASH)
    op.create_index("failures_key_hash", "failures", ["lane", "aggregate_type", hashed], schema=schema)
    # The default partition's first, so that it has the name; the parent's takes it over, and makes the others.
    for table in ("published_default", "published"):
        op.create_index(
            f"{table}_key_hash", table, ["aggregate_type", hashed], schema=schema, if_not_exists=table != "published"
        )
    # With those of its partitions.
    op.drop_index("published_aggregate", "published", schema=schema)
    op.drop_index("failures_key", "failures", schema=schema)


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    _hold_back(schema)
    op.create_index("failures_key", "failures", ["lane", "aggregate_type", "aggregate_id"], schema=schema)
    for table in ("published_default", "published"):
        op.create_index(f"{table}_aggregate", table, ["aggregate_type", "aggregate_id"], schema=schema)
    op.drop_index("published_key_hash", "published", schema=schema)
    op.drop_index("failures_key_hash", "failures", schema=schema)


def _hold_back(schema: str) -> None:
    """Lock in the order in which relays do, a parent before its partitions: or each could wait for the other."""
    tables = ", ".join(_quoted(schema, name) for name in ("failures", "published"))
    op.execute(sa.DDL("LOCK TABLE %(tables)s IN SHARE ROW EXCLUSIVE MODE", context={"tables": tables}))


def _quoted(schema: str, name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
