"""Alembic's environment. outbox/_app/migrate.py drives it and passes everything in ``config.attributes``.

connection  an open connection in a transaction; none for offline SQL
schema      where the tables go
lanes       how many lanes the first upgrade makes
"""

from alembic import context
from sqlalchemy.schema import CreateSchema

attributes = context.config.attributes
schema = attributes["schema"]
connection = attributes.get("connection")
options = {"version_table": "alembic_version", "version_table_schema": schema, "include_schemas": True}

if connection is None:
    context.configure(
        dialect_name="postgresql",
        # The default paramstyle doubles each %, for a driver that undoes it; no driver reads a script.
        dialect_opts={"paramstyle": "named"},
        literal_binds=True,
        output_buffer=attributes["output"],
        **options,
    )
else:
    context.configure(connection=connection, **options)

with context.begin_transaction():
    # Whoever may create in another schema of the path can plant functions there; see outbox/_clients/search_path.py.
    context.execute("SET LOCAL search_path = pg_catalog")
    if attributes["create_schema"]:
        # Before alembic makes its own table there.
        context.execute(CreateSchema(schema, if_not_exists=True))
    context.run_migrations()
