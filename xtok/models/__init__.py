"""A model and its cache: loading, trying out what it can do, forwarding, rolling back.

Nothing here knows who guesses, or how ids are picked.
"""
