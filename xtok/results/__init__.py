"""What a generation gave: its text and figures, the trace of its rounds, and how those are shown."""
