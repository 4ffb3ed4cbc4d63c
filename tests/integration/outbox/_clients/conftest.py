"""One database in which names are planted, for both files with tests of them."""

from __future__ import annotations

from planted_support import admin, hostile, template

__all__ = ["admin", "hostile", "template"]
