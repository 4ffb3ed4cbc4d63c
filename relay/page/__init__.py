"""The operations page: what the pipeline is doing, and the actions of an operator, in a browser.

``outbox web`` serves it; ``create_page`` returns it as an ASGI application, for a host that mounts it.
"""

from relay.page.app import create_page
from relay.page.security import Access, Role, User

__all__ = ["Access", "Role", "User", "create_page"]
