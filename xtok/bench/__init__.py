"""Benchmarks: systems side by side, in turns, on the same work. No code that generates imports from here."""
