"""From a message's bytes to columns. A row that does not decode keeps its place and says why, in PROBLEM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, cast, runtime_checkable

from spark_jobs.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

PROBLEM: Final = "message_problem"
"""Column that is NULL, or says why the row can't be applied. Never copied."""


@runtime_checkable
class Decoder(Protocol):
    """Adds the payload's columns to rows of Spark's Kafka source."""

    def names(self) -> tuple[str, ...]:
        """Give the names of the columns that ``decode`` adds, PROBLEM not among them. Raises JobError."""
        ...

    def decode(self, rows: DataFrame) -> DataFrame:
        """Give ``rows`` (key, value, topic, partition, offset, timestamp, headers), its own columns, and PROBLEM.

        Narrow: a row stays a row and stays where it is.
        """
        ...


@dataclass(frozen=True, slots=True)
class Raw:
    """The payload as it is, in a column ``payload``."""

    def names(self) -> tuple[str, ...]:
        """Give ``payload``."""
        return ("payload",)

    def decode(self, rows: DataFrame) -> DataFrame:
        """Add ``payload``; nothing can be wrong with bytes."""
        from pyspark.sql import functions as F  # noqa: N812  the name everybody knows it by

        return rows.select("*", F.col("value").alias("payload"), F.lit(None).cast("string").alias(PROBLEM))


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON object, read by a declared schema: Spark DDL, as ``"order_id string, amount_cents long"``."""

    schema: str

    def _declared(self) -> StructType:
        from pyspark.errors import PySparkException
        from pyspark.sql.types import StructType

        try:
            return cast("StructType", StructType.fromDDL(self.schema))
        except PySparkException as error:
            raise JobError(f"schema: Spark can't read it as DDL: {error.getCondition() or error}") from error

    def names(self) -> tuple[str, ...]:
        """Give the fields' names."""
        return tuple(self._declared().fieldNames())

    def decode(self, rows: DataFrame) -> DataFrame:
        """Add the fields."""
        from pyspark.sql import functions as F  # noqa: N812
        from pyspark.sql.types import StringType, StructType

        corrupt = "message_corrupt"
        declared = self._declared()
        with_corrupt = StructType(list(declared.fields)).add(corrupt, StringType())
        parsed = F.from_json(
            F.col("value").cast("string"), with_corrupt, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": corrupt}
        )
        problem = F.when(F.col(corrupt).isNotNull(), F.lit("the payload does not fit the job's schema"))
        return (
            rows.select("*", parsed.alias("message_parsed"))
            .select(*rows.columns, "message_parsed.*")
            .withColumn(PROBLEM, problem)
            .drop(corrupt)
        )


def decoder_of(schema: str | Decoder | None) -> Decoder:
    """Give the decoder that a job's ``schema`` stands for. Raises JobError."""
    if schema is None:
        return Raw()
    return Json(schema) if isinstance(schema, str) else schema
