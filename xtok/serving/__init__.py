"""The engine, guesses for other engines, and OpenAI's API over HTTP."""
