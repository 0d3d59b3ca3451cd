"""Settings of the laboratory's tests: those of all others, without a deadline for examples."""

from tests.explore import load_profile

load_profile()
