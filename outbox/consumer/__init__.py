"""What every consumer of the outbox' topics shares: what a message of Kafka says, and the ids in it.

Imports neither Spark, SQLAlchemy, pydantic nor a driver: tasks on Spark's executors import it too.
"""
