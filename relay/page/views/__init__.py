"""The views of the page, one module each: ``VIEWS`` is what it serves."""
