"""Tests of `figures`: the interactive timeline and the page of it."""
