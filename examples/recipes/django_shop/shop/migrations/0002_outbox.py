"""The outbox's tables, from what `outbox db sql > shop/migrations/0002_outbox.sql` has written."""

from pathlib import Path

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]
    atomic = False  # the file has a BEGIN and a COMMIT of its own
    operations = [migrations.RunSQL(Path(__file__).with_suffix(".sql").read_text())]
