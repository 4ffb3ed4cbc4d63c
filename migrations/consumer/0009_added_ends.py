"""Where other partitions ended when an added one was first seen with messages; and an index for ``keep_order``.

``outbox consume --once`` is a new driver in each run. On a topic that always gets messages, ends that each run asks for
anew are never reached, so they are kept. The index makes what each round asks of dead letters independent of their
number.

Locks: ACCESS EXCLUSIVE on ``groups`` for a moment; a consumer that writes a dead letter waits while the existing ones
are read.

Frozen as it was written; a test holds it against spark_jobs/postgres/tables.py.
"""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "consumer_0009"
down_revision = "consumer_0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.add_column("groups", sa.Column("added_ends", pg.JSONB(none_as_null=True), nullable=True), schema=schema)
    op.create_index(
        "dead_letters_behind_by_id",
        "dead_letters",
        ["grp", sa.text("(- id)")],
        schema=schema,
        postgresql_where=sa.text("state = 'dead' AND reason = 'behind'"),
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.drop_index("dead_letters_behind_by_id", "dead_letters", schema=schema)
    op.drop_column("groups", "added_ends", schema=schema)
