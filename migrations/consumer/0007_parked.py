"""Calls behind an earlier one of their order_key are parked, so that claims do not look at them again and again.

Existing calls that wait behind another one are parked here: 100,000 of them take some seconds. A caller of an earlier
version does not release what is parked; that is due again an hour later.

Locks: ACCESS EXCLUSIVE on ``reservations`` while its open rows are read and its index of them is built.

Frozen as it was written; a test holds it against spark_jobs/postgres/tables.py.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "consumer_0007"
down_revision = "consumer_0006"
branch_labels = None
depends_on = None

_OPEN = "state IN ('reserved', 'calling', 'cancelling')"


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.add_column(
        "reservations",
        sa.Column("parked", sa.Boolean(), nullable=False, server_default=sa.text("false")),
        schema=schema,
    )
    op.drop_index("reservations_open", "reservations", schema=schema)
    table = sa.table(
        "reservations",
        *(sa.column(name) for name in ("id", "grp", "name", "message_id", "order_key", "state", "parked")),
        sa.column("next_attempt_at", sa.DateTime(timezone=True)),
        sa.column("settled_at", sa.DateTime(timezone=True)),
        schema=schema,
    )
    unsettled = (
        sa.select(
            table.c.grp,
            table.c.name,
            table.c.message_id,
            sa.func.row_number()
            .over(partition_by=(table.c.grp, table.c.name, table.c.order_key), order_by=table.c.id)
            .label("place"),
        )
        .where(table.c.settled_at.is_(None), table.c.order_key.is_not(None))
        .subquery("unsettled")
    )
    # Only what waits, not what is being called or is stuck. By the primary key, or there may be no index for the join.
    keys = [table.c[name] == unsettled.c[name] for name in ("grp", "name", "message_id")]
    op.execute(
        sa.update(table)
        .values(parked=sa.true(), next_attempt_at=sa.func.now() + sa.text("interval '1 hour'"))
        .where(*keys, unsettled.c.place > 1, table.c.state.in_(("reserved", "cancelling")))
    )
    op.create_index(
        "reservations_open",
        "reservations",
        ["grp", "name", "parked", "next_attempt_at", "id"],
        schema=schema,
        postgresql_where=sa.text(_OPEN),
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    table = sa.table(
        "reservations", sa.column("parked"), sa.column("next_attempt_at", sa.DateTime(timezone=True)), schema=schema
    )
    op.execute(sa.update(table).values(next_attempt_at=sa.func.now()).where(table.c.parked))
    op.drop_index("reservations_open", "reservations", schema=schema)
    op.drop_column("reservations", "parked", schema=schema)
    op.create_index(
        "reservations_open",
        "reservations",
        ["grp", "name", "next_attempt_at", "id"],
        schema=schema,
        postgresql_where=sa.text(_OPEN),
    )
