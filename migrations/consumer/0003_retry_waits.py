"""An index of the dead letters that a round may have to act on.

Each round checks for them. Without the index, each check reads all of the group's dead letters: once a round, and more
often than once a second while the consumer is idle.

Locks: a consumer that writes a dead letter waits while the existing ones are read once.

Frozen as it was written; a test holds it against spark_jobs/postgres/tables.py.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "consumer_0003"
down_revision = "consumer_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.create_index(
        "dead_letters_waiting",
        "dead_letters",
        ["grp", "state", "topic"],
        schema=schema,
        postgresql_where=sa.text("state = 'retry' OR reason = 'behind'"),
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.drop_index("dead_letters_waiting", "dead_letters", schema=schema)
