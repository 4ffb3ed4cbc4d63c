"""Overview: one line that says whether all is well, the figures, their charts, relays and groups."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from outbox.errors import ConfigurationError
from relay.page.api import view
from relay.page.charts import MINUTES
from relay.page.page import Page
from relay.page.sampling import Latency, Sample
from relay.pipeline.overview import Overview

_RANGES = ", ".join(map(str, MINUTES))


@view(
    "/",
    "what needs attention, the figures, relays and groups",
    {"minutes": f"samples: of {_RANGES}"},
    shows={
        "overview": Overview | None,
        "problems": Sequence[str],
        "minutes": int,
        "samples": Sequence[Sample],
        "latency": Latency | None,
    },
)
def show(page: Page, request: Request) -> Response:
    minutes = _minutes(request.query_params.get("minutes"))
    overview = page.sampler.latest()
    samples = page.sampler.samples(minutes * 60)
    return page.render(
        request,
        "overview.html",
        overview=overview,
        problems=page.problems(overview),
        minutes=minutes,
        samples=samples,
        latency=samples[-1].latency if samples else None,
    )


def _minutes(text: str | None) -> int:
    if text is None:
        return MINUTES[1]
    if text not in map(str, MINUTES):
        raise ConfigurationError(f"minutes must be one of {_RANGES}, not {text[:80]!r}")
    return int(text)


VIEWS = (show,)
