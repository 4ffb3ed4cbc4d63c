"""Indexes over a hash of the key: a btree takes rows of 2,704 bytes, and a key may have 4,000.

Locks: writes to ``failures`` and to ``published`` with all its partitions wait from the beginning to the end, and reads
of them for a moment at the end; writers of events do not wait. The indexes of the archive are built meanwhile: a few
seconds for a million events. Relays can't settle what they have published during that time, and go on afterwards. An
archive that is too large for such a pause can have the index built on each of its partitions beforehand, while
everything runs (``CREATE INDEX CONCURRENTLY ON … (aggregate_type, hashtextextended(aggregate_id, 0))``): this revision
takes over those that it finds, and drops those whose build did not finish. Relays of the previous version work with
these indexes too, and relays of this one without them; both are slower while a lane has many failures.

The downgrade is refused while there is a key too long for the old indexes.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "outbox_0004"
down_revision = "outbox_0003"
branch_labels = None
depends_on = None

_HASH = "hashtextextended(aggregate_id, 0::bigint)"


# A host application's transaction goes on with its own search path.
# A cancelled build leaves an index that is never used, and that would make the parent's index invalid.
_BUILT_BEFOREHAND = """
DO $$
DECLARE
    made record;
    path text := pg_catalog.current_setting('search_path');
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog', true);
    FOR made IN
        SELECT x.indexrelid::regclass AS name, x.indisvalid AS valid
          FROM pg_inherits AS i JOIN pg_index AS x ON x.indrelid = i.inhrelid
         WHERE i.inhparent = {published}::regclass
           AND (NOT x.indisvalid
                OR x.indrelid = {default}::regclass AND x.indexrelid IS DISTINCT FROM to_regclass({index}))
           AND position('(aggregate_type, hashtextextended(aggregate_id, ' IN pg_get_indexdef(x.indexrelid)) > 0
    LOOP
        IF NOT made.valid THEN
            EXECUTE 'DROP INDEX ' || made.name;
        ELSIF to_regclass({index}) IS NULL THEN
            EXECUTE 'ALTER INDEX ' || made.name || ' RENAME TO published_default_key_hash';
        END IF;
    END LOOP;
    PERFORM pg_catalog.set_config('search_path', path, true);
END
$$"""


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    _hold_back(schema)
    names = {"published": "published", "default": "published_default", "index": "published_default_key_hash"}
    literals = {key: "'" + _quoted(schema, name).replace("'", "''") + "'" for key, name in names.items()}
    op.execute(_BUILT_BEFOREHAND.format(**literals))
    hashed = sa.text(_HASH)
    op.create_index("failures_key_hash", "failures", ["lane", "aggregate_type", hashed], schema=schema)
    # The default partition's index first, so that it gets its name; the parent's attaches it and creates the others.
    for table in ("published_default", "published"):
        op.create_index(
            f"{table}_key_hash", table, ["aggregate_type", hashed], schema=schema, if_not_exists=table != "published"
        )
    # This drops the partitions' indexes too.
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
    """Lock in the same order as relays, a parent before its partitions, so that neither deadlocks the other."""
    tables = ", ".join(_quoted(schema, name) for name in ("failures", "published"))
    op.execute(sa.DDL("LOCK TABLE %(tables)s IN SHARE ROW EXCLUSIVE MODE", context={"tables": tables}))


def _quoted(schema: str, name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
