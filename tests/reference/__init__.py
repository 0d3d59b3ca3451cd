"""Tests of the package `reference`; `test_X.py` has those of the module `X`."""
