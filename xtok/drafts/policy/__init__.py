"""How much to guess: the settings, the latency model, the gates, and the policy that combines them."""
