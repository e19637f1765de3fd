"""Sampling by noise: the noise itself, draws from a distribution, and what is known of logits processors."""
