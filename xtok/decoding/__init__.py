"""From a prompt to a sequence, and its rounds until it ends."""
