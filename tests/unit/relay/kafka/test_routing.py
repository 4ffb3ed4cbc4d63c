"""Aggregate type to topic."""

from __future__ import annotations

import pytest

from outbox.errors import ConfigurationError
from relay.kafka.routing import NoRoute, Route, Router


def test_the_default_is_lower_case_and_events():
    assert Router().route("Order").topic == "order-events"


def test_a_list_admits_nothing_else():
    router = Router({"Order": Route("shop.orders")})
    assert router.route("Order").topic == "shop.orders"
    with pytest.raises(NoRoute, match=r"'Payment'.*routes"):
        router.route("Payment")


@pytest.mark.parametrize("name", ["order item", "ordér", "x" * 250, "../x"])
def test_a_type_that_makes_no_topic_is_refused_and_says_so(name):
    with pytest.raises(NoRoute, match="route"):
        Router().route(name)


@pytest.mark.parametrize("topic", ["__consumer_offsets", "outbox.relay.state", "", ".", "a b", "x" * 250])
def test_a_route_to_an_impossible_topic_is_refused(topic):
    with pytest.raises(ConfigurationError, match="routes"):
        Router({"Order": Route(topic)})


@pytest.mark.parametrize("template", ["events", "__{aggregate_type}", "{aggregate_type} events"])
def test_a_bad_template_is_refused(template):
    with pytest.raises(ConfigurationError, match="topic_template"):
        Router(template=template)


def test_which_topics_can_be_written_is_known_beforehand():
    listed = Router({"Order": Route("shop.orders", dead_letter_topic="dead")})
    assert [listed.may_write(topic) for topic in ("shop.orders", "dead", "order-events")] == [True, True, False]
    made = Router(template="shop.{aggregate_type}.events", dead_letter_topic="dead")
    wanted = {"shop.order.events": True, "dead": True, "shop..events": False, "shop.events": False, "orders": False}
    assert {topic: made.may_write(topic) for topic in wanted} == wanted
    assert not Router(template="{aggregate_type}").may_write("__consumer_offsets")
    assert not Router(template="{aggregate_type}").may_write("outbox.relay.state")
