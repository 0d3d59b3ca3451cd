"""Checks: what is verified at construction and during training, and the text of every error."""
