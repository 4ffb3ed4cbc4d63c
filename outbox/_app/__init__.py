"""Code that both applications share, relay and consumers. The library, which a service embeds, must not import it."""
