"""manage.py place_order CUSTOMER TOTAL_CENTS"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import transaction
from shop.models import Customer
from shop.orders import place_order


class Command(BaseCommand):
    help = "Place an order for a customer, who is made if there is none of this name."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("customer")
        parser.add_argument("total_cents", type=int)

    @transaction.atomic
    def handle(self, *_: Any, customer: str, total_cents: int, **__: Any) -> str:
        found, _ = Customer.objects.get_or_create(name=customer)
        return str(place_order(found.pk, total_cents).pk)
