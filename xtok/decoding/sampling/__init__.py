"""Picks: processors, noise, and draws from the target's logits."""
