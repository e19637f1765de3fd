"""Drafts: everything that guesses how a sequence goes on. Nothing here runs the target."""
