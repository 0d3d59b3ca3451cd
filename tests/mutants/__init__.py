"""Mutants: one-line faults in the reducer, and which test catches each: `python -m tests.mutants.run`."""
