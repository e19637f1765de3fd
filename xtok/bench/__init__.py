"""Measuring: systems side by side, in turns, on the same work. Nothing that generates imports from here."""
