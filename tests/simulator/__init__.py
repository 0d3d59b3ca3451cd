"""Tests of the package `simulator`: `test_X.py` is about the module `X`."""
