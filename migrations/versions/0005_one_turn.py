"""One turn for all lanes of a worker: the transactional.id under which a lane may have been written.

A worker has one transactional producer for all its lanes, so a new holder can't derive from the lane which id to fence:
the row names it. The empty text stands for the ids of the previous version, ``<name>.relay.<lane>``.

``protocol_epoch`` keeps relays of the previous version out. They raise only ``epoch`` when they take a lane, and the
constraint refuses that, so they can neither publish beside a holder that they do not fence nor escape being fenced
themselves. Lanes that they hold when this revision runs stay theirs until they stop.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "outbox_0005"
down_revision = "outbox_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.add_column("lanes", sa.Column("transactional_id", sa.Text()), schema=schema)
    op.add_column(
        "lanes",
        sa.Column("protocol_epoch", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        schema=schema,
    )
    lanes = sa.table(
        "lanes",
        *map(sa.column, ("epoch", "protocol_epoch", "owner", "last_batch", "transactional_id")),
        schema=schema,
    )
    op.execute(sa.update(lanes).values(protocol_epoch=lanes.c.epoch))
    op.execute(
        sa.update(lanes)
        .where(sa.or_(lanes.c.owner.is_not(None), lanes.c.last_batch.is_not(None)))
        .values(transactional_id=sa.literal_column("''"))
    )
    op.create_check_constraint("lanes_protocol", "lanes", "protocol_epoch = epoch", schema=schema)


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_constraint("lanes_protocol", "lanes", schema=schema)
    op.drop_column("lanes", "protocol_epoch", schema=schema)
    op.drop_column("lanes", "transactional_id", schema=schema)
