"""Answers derived from the timeline of a prediction, or from the table of a sweep."""
