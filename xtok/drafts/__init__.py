"""Drafts: all that guesses how a sequence goes on. The target is not run here."""
