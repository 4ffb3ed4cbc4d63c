"""consumer.reservations is vacuumed once a hundredth of it has changed. outbox/consumer/tables.py says why."""

import sqlalchemy as sa
from alembic import context, op

revision = "consumer_2"
down_revision = "consumer_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _alter("SET (autovacuum_vacuum_scale_factor = 0.01)")


def downgrade() -> None:
    _alter("RESET (autovacuum_vacuum_scale_factor)")


def _alter(action: str) -> None:
    schema = context.config.attributes.get("schema", "consumer")
    table = ".".join('"' + name.replace('"', '""') + '"' for name in (schema, "reservations"))
    op.execute(sa.DDL(f"ALTER TABLE %(table)s {action}", context={"table": table}))
