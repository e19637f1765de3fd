"""An engine over HTTP, with OpenAI's API. Imported only by `xtok serve`."""
