"""Drafters that need no model: run live by the engine, afterwards by replay."""
