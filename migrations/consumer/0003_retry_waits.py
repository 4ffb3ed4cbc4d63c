"""An index of the dead letters that a round may have to do something about.

Each round asks whether there are any. Without the index all of the group's dead letters are read for that, once a round
or more often than once a second while there is nothing else to do.

Locks: a consumer that puts a dead letter aside waits while the dead letters that are there are read once.

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
