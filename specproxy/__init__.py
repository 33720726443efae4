"""specproxy: routes each request to the decoding strategy that measures fastest on this machine."""

__version__ = "0.1.0"
