"""What operators do and look at: one module for each action or view.

All of it raises Unavailable when Postgres or Kafka can't be reached or takes too long, and SchemaError without the
tables or the rights. Connections are in autocommit.
"""
