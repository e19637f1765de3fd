"""An engine over HTTP, as OpenAI's API has it: what clients may ask, and what they are told. Texts are written by the engine.
Imported only when it is asked for.
"""
