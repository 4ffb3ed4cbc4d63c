"""The views of the page, one module each: ``routes(page)`` returns what it serves."""
