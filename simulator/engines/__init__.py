"""Two engines, one meaning: by events, and by recurrence."""
