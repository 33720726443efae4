"""The embedded engine: one copy of the weights, a strategy per request."""
