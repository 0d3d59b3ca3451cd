"""Errors: one `except` catches them all, and so does that of the built-in class that each one also is."""

import pytest

from reference.errors import Error, LinkError, ModelError, RankError, TraceError


@pytest.mark.parametrize(
    ("kind", "built_in"), [(TraceError, ValueError), (ModelError, ValueError), (LinkError, OSError)]
)
def test_an_error_is_ours_and_a_built_in_one(kind, built_in):
    for caught in (Error, built_in):
        with pytest.raises(caught, match=r"^what was expected$"):
            raise kind("what was expected")


def test_a_failed_rank_has_what_the_others_had_returned():
    error = RankError(3, "rank 3 failed", returned={0: "a"})
    assert isinstance(error, Error | RuntimeError)
    assert (str(error), error.rank, error.returned) == ("rank 3 failed", 3, {0: "a"})
    assert RankError(0, "").returned == {}
