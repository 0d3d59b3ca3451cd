"""The class under test, found by its name."""

import pytest

from ddplab.conformance.class_under_test import Subject


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all:DDP", "expected the name of an importable module"),
        ("torch.nn:nothing_of_this_name", "expected a class or a function named nothing_of_this_name"),
        ("torch.nn:Module.forward", "expected MODULE:CLASS"),
        (":C", "expected MODULE:CLASS"),
    ],
)
def test_a_class_that_does_not_exist_is_told_in_one_line(name, message):
    with pytest.raises(ValueError, match=message) as error:
        Subject(name).offer()
    assert "\n" not in str(error.value)
