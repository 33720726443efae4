"""One module a backend, all behind the Backend protocol of base."""
