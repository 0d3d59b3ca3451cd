"""The tests of the package `ddplab`: those of `ddplab/**/X.py` are in `test_X.py`."""
