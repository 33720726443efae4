"""Pure decision logic: no I/O, no clock, no global state. Time and randomness come in as arguments."""
