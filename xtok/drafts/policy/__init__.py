"""How much to guess: the settings, predicted seconds, and the policy, which decides what pays."""
