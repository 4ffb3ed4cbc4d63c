"""System: sizes, dead rows, partitions, and the settings without secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from outbox._clients.variables import variable
from outbox.urls import display_url
from relay.page.api import Rows, view
from relay.page.page import Page
from relay.sizes import server, table_sizes

# Of Kafka's options only these are shown: others may hold credentials, under whatever name.
_KAFKA_SHOWN: Final = frozenset(
    {"bootstrap.servers", "security.protocol", "sasl.mechanism", "sasl.mechanisms", "linger.ms", "compression.type"}
)


@view(
    "/system",
    "sizes, dead rows, and the settings of this process without secrets",
    shows={
        "about": Mapping[str, Any],
        "tables": Rows,
        "settings": Sequence[tuple[str, str, bool]],
        "consumer_tables": Rows,
    },
)
def show(page: Page, request: Request) -> Response:
    here = page.settings.relay.sink_url is None
    with page.outbox() as connection:
        return page.render(
            request,
            "system.html",
            about=server(connection),
            tables=table_sizes(connection, page.schema),
            settings=list(_shown(page.settings)),
            consumer_tables=table_sizes(connection, page.settings.consumer_schema) if here else [],
        )


def _shown(model: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, bool]]:
    """Yield each setting's variable, its value, and whether it differs from the default. Secrets only as "set"."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        here = (*path, "schema" if name == "db_schema" else name)
        if isinstance(value, BaseModel):
            yield from _shown(value, here)
            continue
        changed = value != field.get_default(call_default_factory=True)
        match name:
            case "database_url":
                shown = "-" if value is None else display_url(value)
            case "kafka":
                shown = ", ".join(
                    f"{option}={text}" if option in _KAFKA_SHOWN else f"{option} is set"
                    for option, text in sorted(value.items())
                )
            case "routes" if value:
                shown = ", ".join(f"{kind} → {route.topic}" for kind, route in sorted(value.items()))
            case _:
                shown = str(value) if field.repr else ("set" if value else "-")
        yield variable(here), "-" if shown in {"", "None"} else shown, changed


VIEWS = (show,)
