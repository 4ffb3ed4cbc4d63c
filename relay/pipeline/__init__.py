"""Views over both sides, relay and consumers: the only package of the relay, besides its commands, that knows both."""
