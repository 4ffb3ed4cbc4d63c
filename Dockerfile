# The relay and the command line. (The Spark jobs run where Spark is.)
FROM python:3.13-slim
WORKDIR /app
COPY pyproject.toml README.md LICENSE requirements.lock ./
COPY outbox outbox
COPY relay relay
COPY spark_jobs spark_jobs
COPY migrations migrations
COPY examples examples
# The lock holds the versions; it names more than the relay needs, so it constrains and does not list.
RUN sed -e 's/ *\\$//' -e '/--hash/d' requirements.lock > constraints.txt \
 && pip install --no-cache-dir --constraint constraints.txt ".[relay]"
RUN useradd --system --no-create-home outbox
USER outbox
ENTRYPOINT ["outbox"]
CMD ["relay", "run"]
