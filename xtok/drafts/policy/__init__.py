"""How much is guessed: the settings, the latency model, the gates, and the policy that puts them together."""
