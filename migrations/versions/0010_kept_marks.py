"""Where a lane's next holder may start to read, and for which failures that holds.

Locks: ADD COLUMN and the constraint take the small table ``lanes`` for a moment; relays wait.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "outbox_0010"
down_revision = "outbox_0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.add_column("lanes", sa.Column("low_water_mark", sa.BigInteger), schema=schema)
    op.add_column("lanes", sa.Column("mark_failures", sa.Text), schema=schema)
    op.create_check_constraint(
        "lanes_mark", "lanes", "(low_water_mark IS NULL) = (mark_failures IS NULL)", schema=schema
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_column("lanes", "mark_failures", schema=schema)
    op.drop_column("lanes", "low_water_mark", schema=schema)
