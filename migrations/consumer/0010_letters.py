"""Indexes for what looks at the dead letters each second, however many wait.

Locks: consumers that write a dead letter wait while the existing ones are read three times.

Frozen as it was written; a test holds it against spark_jobs/postgres/tables.py.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "consumer_0010"
down_revision = "consumer_0009"
branch_labels = None
depends_on = None

_KEY = sa.text("sha256(message_key)")
_INDEXES = (
    ("dead_letters_retry", ["grp", "topic", "part", "message_offset", "id"], "state = 'retry'"),
    (
        "dead_letters_behind",
        ["grp", "topic", "part", _KEY, "message_offset"],
        "state = 'dead' AND reason = 'behind'",
    ),
    (
        "dead_letters_first",
        ["grp", "topic", _KEY, "part", "message_offset"],
        "state = 'dead' AND reason <> 'behind'",
    ),
)


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    for name, columns, where in _INDEXES:
        op.create_index(name, "dead_letters", columns, schema=schema, postgresql_where=sa.text(where))


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    for name, _, _ in _INDEXES:
        op.drop_index(name, "dead_letters", schema=schema)
