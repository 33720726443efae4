"""Where statistics live between runs: `open_store` gives the default one, `StoreWriter` serves async code."""

from specproxy.store.base import Entry, Event, MemoryStore, Row, Store
from specproxy.store.sqlite import SqliteStore, open_store
from specproxy.store.writer import StoreWriter

__all__ = ["Entry", "Event", "MemoryStore", "Row", "SqliteStore", "Store", "StoreWriter", "open_store"]
