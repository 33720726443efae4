"""Faults against the real proxy: misbehaving upstreams, misbehaving clients, and against itself."""
