"""Tutorials: notebooks, and what the ranks in them do."""
