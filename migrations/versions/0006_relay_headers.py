"""Headers that begin with ``outbox-`` are the relay's: a row may have them only with ``from_relay``.

A dead letter's copy and a replayed event are rows of ``events`` like any other, and the relay recognizes them by such a
header: a copy goes to the dead-letter topic, and does not wait for the events before it. A writer that sets the header
itself could overtake a blocked key. The constraint refuses the header in a row without ``from_relay``, and a role with
INSERT on the other columns only (`outbox db roles`) can't set that one. Existing rows stay as they are.

Locks: writers of events and relays wait while the unpublished rows are checked, about a second for a million. Nothing
is rewritten. From here on a relay of the previous version can't write a dead letter's copy: its lane waits until that
relay is stopped.

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
    # True for existing rows, without rewriting them, and false for new ones.
    op.add_column(
        "events",
        sa.Column("from_relay", sa.Boolean(), nullable=False, server_default=sa.text("true")),
        schema=schema,
    )
    op.alter_column("events", "from_relay", server_default=sa.text("false"), schema=schema)
    op.create_check_constraint(
        "events_relay_headers",
        "events",
        "from_relay OR NOT pg_catalog.jsonb_path_exists(headers, '$.keyvalue() ? (@.key starts with \"outbox-\")')",
        schema=schema,
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_constraint("events_relay_headers", "events", schema=schema)
    op.drop_column("events", "from_relay", schema=schema)
