"""Tutorials: notebooks, and the functions that their ranks run."""
