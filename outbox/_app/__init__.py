"""What the two applications share, relay and consumers; closed to the library, which a service embeds."""
