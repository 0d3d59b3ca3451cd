"""Exercises of the tutorials, with their checks, hints and solutions: one module for each notebook."""
