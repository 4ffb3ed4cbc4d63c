"""Overview: one line that says whether all is well, the figures, their charts, relays and groups."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outbox.errors import ConfigurationError
from relay.page.charts import MINUTES, charts
from relay.page.page import Page


def routes(page: Page) -> list[Route]:
    """Return the routes of this view."""

    def show(request: Request) -> Response:
        minutes = _minutes(request.query_params.get("minutes"))
        overview = page.sampler.latest()
        samples = page.sampler.samples(minutes * 60)
        return page.render(
            request,
            "overview.html",
            overview=overview,
            problems=page.problems(overview),
            minutes=minutes,
            ranges=MINUTES,
            charts=charts(samples),
            latency=samples[-1].latency if samples else None,
        )

    return [Route("/", show)]


def _minutes(text: str | None) -> int:
    if text is None:
        return MINUTES[1]
    if text not in map(str, MINUTES):
        raise ConfigurationError(f"minutes must be one of {', '.join(map(str, MINUTES))}, not {text[:80]!r}")
    return int(text)
