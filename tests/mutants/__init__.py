"""Mutants: faults planted into the reducer, and which test catches each: `python -m tests.mutants.run`."""
