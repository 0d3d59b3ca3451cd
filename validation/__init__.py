"""The public score: predictions beside figures that others published; `python -m validation.score`."""
