"""One turn for all lanes of a worker: under which transactional.id a lane may have been written.

A worker has one transactional producer for all its lanes, so the lane itself no longer says whom a new holder has to
fence: the row does. The empty text stands for the ids of the version before, ``<name>.relay.<lane>``.

``protocol_epoch`` keeps relays of the version before away. They raise ``epoch`` alone when they take a lane, and the
constraint refuses that, so they can neither publish beside a holder whom they do not fence nor be missed by one. What
they hold when this revision runs, they keep until they stop.

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
