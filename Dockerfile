# Two images from one file. The relay's, with the page and all commands:
#   docker build -t outbox .
# The consumer's, with Spark and Java besides:
#   docker build -t outbox-consumer --target consumer .
# For production, pin the base image by its digest: --build-arg PYTHON=python:3.13-slim@sha256:…
ARG PYTHON=python:3.13-slim

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
# What is installed changes less often than the source: layers of their own, by locks with hashes.
COPY deploy/build.lock deploy/relay.lock ./deploy/
RUN python -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r deploy/build.lock \
 && python -m venv /opt/outbox && /opt/outbox/bin/pip install --require-hashes -r deploy/relay.lock
COPY pyproject.toml README.md LICENSE ./
COPY outbox outbox
COPY relay relay
COPY spark_jobs spark_jobs
COPY migrations migrations
COPY examples examples
RUN /opt/build/bin/python -m hatchling build -t wheel -d /wheel \
 && /opt/outbox/bin/pip install --no-deps --no-index /wheel/*.whl

FROM build AS build-consumer
COPY deploy/consumer.lock ./deploy/
RUN /opt/outbox/bin/pip install --require-hashes -r deploy/consumer.lock

FROM ${PYTHON} AS base
# Nothing is written but to /tmp, so that the root file system can be read-only.
ENV PATH=/opt/outbox/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /srv
ENTRYPOINT ["outbox"]
STOPSIGNAL SIGTERM

FROM base AS consumer
RUN apt-get update \
 && apt-get install -y --no-install-recommends openjdk-21-jre-headless procps \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build-consumer /opt/outbox /opt/outbox
USER 10001:10001
CMD ["consume", "--help"]

# The last stage is what is built if none is named.
FROM base AS relay
COPY --from=build /opt/outbox /opt/outbox
USER 10001:10001
ENV OUTBOX_RELAY__METRICS_ADDRESS=0.0.0.0:9100
EXPOSE 9100
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9100/livez', timeout=4)"]
CMD ["relay", "run"]
