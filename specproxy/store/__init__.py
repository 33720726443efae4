"""Where statistics live between runs."""
