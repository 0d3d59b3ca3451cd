"""Errors: one `except` catches them all, and so does that of the built-in class that each one also is."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference import errors
from ddplab.reference.errors import Error, ModelError, RankError, TraceError

OF_RANKS = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, RankError)]


@pytest.mark.parametrize(("kind", "built_in"), [(TraceError, ValueError), (ModelError, ValueError)])
def test_an_error_is_ours_and_a_built_in_one(kind, built_in):
    for caught in (Error, built_in):
        with pytest.raises(caught, match=r"^what was expected$"):
            raise kind("what was expected")


@given(st.sampled_from(OF_RANKS), st.integers(0, 9), *[st.text()] * 4, st.dictionaries(st.integers(), st.text()))
def test_an_error_of_a_rank_is_the_same_in_another_process(kind, rank, cause, advice, trace, last_output, returned):
    fields = {"advice": advice, "traceback": trace, "last_output": last_output, "returned": returned}
    error = pickle.loads(pickle.dumps(kind(rank, cause, **fields)))
    assert type(error) is kind
    assert vars(error) == fields | {"rank": rank, "cause": cause}
    assert str(error) == str(kind(rank, cause, **fields))


def test_the_text_of_an_error_of_a_rank_has_all_of_its_fields():
    error = RankError(3, "rank 3 hung.", advice="use join", traceback="File 1", last_output="Stack: 2")
    assert str(error) == "rank 3 hung: use join. Traceback:\n\nFile 1\n\nStack: 2"
    assert str(RankError(3, "rank 3 hung.", last_output="Stack: 2")) == "rank 3 hung.\n\nStack: 2"
    assert str(RankError(3, "rank 3 hung.")) == "rank 3 hung."


def test_the_tree_of_errors_is_that_of_the_classes():
    """Each class is drawn under its parent, four columns to the right."""
    path, drawn = ["Error"], {}
    for line in errors.__doc__.splitlines():
        if "── " in line:
            depth = line.index("── ") // 4
            path[depth:] = [line.partition("── ")[2].split()[0]]
            drawn[path[-1]] = path[depth - 1]
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Error)]
    assert drawn == {one.__name__: one.__bases__[0].__name__ for one in kinds if one is not Error}
