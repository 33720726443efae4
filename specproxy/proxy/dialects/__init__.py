"""One module an API dialect: facts from a request, usage and timings from a reply, errors to a client.

Nothing here changes a byte of what is forwarded, and nothing here raises on what a client or a server sent:
a field of the wrong type counts as absent, because the upstream's own error is the truth.
"""

from __future__ import annotations

from specproxy.proxy.dialects.errors import render_error
from specproxy.proxy.dialects.request import read_facts
from specproxy.proxy.dialects.routes import dialect_of

__all__ = ["dialect_of", "read_facts", "render_error"]
