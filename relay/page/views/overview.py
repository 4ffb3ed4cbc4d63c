"""Overview: one line that says whether all is well, the figures, their charts, relays and groups."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outbox._app.text import age_text
from relay.page.charts import chart
from relay.page.page import Page


def routes(page: Page) -> list[Route]:
    """Return the routes of this view."""

    def show(request: Request) -> Response:
        overview = page.sampler.latest()
        samples = page.sampler.samples()
        times = [sample.at for sample in samples]
        latencies = [sample.latency for sample in samples]
        charts = [
            chart("Waiting", times, [("events", [sample.backlog for sample in samples])], _count),
            chart("Oldest waiting event", times, [("age", [sample.oldest_seconds for sample in samples])], age_text),
            chart(
                "Events per second",
                times,
                [
                    ("written", [sample.written for sample in samples]),
                    ("published", [sample.published for sample in samples]),
                    ("applied", [sample.applied for sample in samples]),
                ],
                _per_second,
            ),
            chart(
                "Latency, written to applied",
                times,
                [
                    ("median", [None if one is None else one.median for one in latencies]),
                    ("p95", [None if one is None else one.p95 for one in latencies]),
                ],
                age_text,
            ),
        ]
        return page.render(
            request,
            "overview.html",
            overview=overview,
            problems=page.problems(overview),
            charts=charts,
            latency=samples[-1].latency if samples else None,
        )

    return [Route("/", show)]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _per_second(value: float) -> str:
    return f"{value:,.0f}/s"
