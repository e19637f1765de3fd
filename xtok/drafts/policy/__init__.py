"""How much is guessed: settings, what forward passes take, and what pays."""
