"""The tables as outbox_1 has them. The models' state is that of the newest version: it has no tables to change."""

from __future__ import annotations

from django.db import migrations

from outbox.django.operations import Revision, models


class Migration(migrations.Migration):
    initial = True
    atomic = False  # a revision is a transaction of its own
    operations = (Revision("outbox_1"), *models())
