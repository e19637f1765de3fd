"""The bytes of ids, and how a text of one tokenizer is written in the ids of another.

Nothing here knows of models, drafts or decoding.
"""
