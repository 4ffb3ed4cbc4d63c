"""POST /orders {"customer": 1, "total_cents": 4200}"""

from __future__ import annotations

import json

from django.db import IntegrityError
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST

from .orders import place_order


@require_POST
def orders(request: HttpRequest) -> JsonResponse:
    """Place an order; 409 if there is no such customer."""
    wanted = json.loads(request.body)
    try:
        order = place_order(wanted["customer"], wanted["total_cents"])
    except IntegrityError:  # Postgres looks for the customer at the commit: by then the event was written too
        return JsonResponse({"error": "no such customer"}, status=409)
    return JsonResponse({"order": order.pk}, status=201)
