"""A model and its KV cache: loading it, trying what it can do, forwarding, and rolling back.

Nothing here knows what guesses, or how ids are picked.
"""
