"""manage.py test"""

from django.db import connection
from django.test import TestCase

from outbox.testing import recorded_events

from .models import Customer, Order


class Orders(TestCase):
    def test_an_order_is_announced(self):
        customer = Customer.objects.create(name="Ann")
        wanted = {"customer": customer.pk, "total_cents": 4200}
        answer = self.client.post("/orders", wanted, content_type="application/json")
        self.assertEqual(answer.status_code, 201)
        (event,) = recorded_events(connection.connection)  # of this test's transaction, which is rolled back
        self.assertEqual((event.aggregate_id, event.event_type), (str(Order.objects.get().pk), "OrderPlaced"))
        self.assertEqual(event.payload, wanted)
