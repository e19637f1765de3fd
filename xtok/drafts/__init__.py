"""Whatever guesses."""
