"""Headers that begin with ``outbox-`` are the relay's: a row may have them only with ``from_relay``.

A dead letter's copy and a replayed event are rows of ``events`` like any other, and the relay knows them by such a
header: a copy goes to the dead-letter topic, and does not wait for the events before it. A writer that sets the header
itself could pass a blocked key by. The constraint refuses the header in a row without ``from_relay``, and a role that
has INSERT on the other columns alone (`outbox db roles`) can't set that one. Rows that are there already are left as
they are.

Locks: writers of events and relays wait while the rows that are not published yet are looked at, about a second for a
million. Nothing is rewritten. A relay of the version before can't write a dead letter's copy from here on: its lane
waits until it is stopped.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "outbox_0006"
down_revision = "outbox_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    # True for the rows that are there, without writing them anew, and false for those that come.
    op.add_column(
        "events",
        sa.Column("from_relay", sa.Boolean(), nullable=False, server_default=sa.text("true")),
        schema=schema,
    )
    op.alter_column("events", "from_relay", server_default=sa.text("false"), schema=schema)
    op.create_check_constraint(
        "events_relay_headers",
        "events",
        "from_relay OR NOT jsonb_path_exists(headers, '$.keyvalue() ? (@.key starts with \"outbox-\")')",
        schema=schema,
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_constraint("events_relay_headers", "events", schema=schema)
    op.drop_column("events", "from_relay", schema=schema)
