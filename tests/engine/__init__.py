"""Tests that run real llama-servers."""
