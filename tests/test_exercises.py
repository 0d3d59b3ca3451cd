"""Exercises of the tutorials: which answers are right; no wrong answer raises or shows the right one."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tutorials.exercises import NOT_ATTEMPTED, Exercise, is_open, matches

NUMBERS = st.floats(1e-3, 1e9) | st.integers(-1000, 1000)
WORDS = st.text("abc", min_size=1, max_size=3)
ANSWERS = st.recursive(
    NUMBERS | WORDS | st.booleans() | st.none(), lambda parts: st.lists(parts, max_size=4), max_leaves=8
)


def exercise(truth, **other):
    return Exercise(
        judge=lambda answer: matches(answer, truth),
        hints=("think again", "look at the second", "it is nearly there"),
        explanation="because",
        solution=lambda: truth,
        **other,
    )


@given(ANSWERS)
def test_the_truth_is_right_and_ellipsis_is_not_attempted(truth):
    assert exercise(truth).verdict(truth) == "right: because"
    assert exercise(truth).verdict(...) == NOT_ATTEMPTED
    assert exercise(truth).verdict([truth, ...]) == exercise(truth).verdict((truth, {"part": ...})) == NOT_ATTEMPTED


@given(ANSWERS, ANSWERS, st.integers(1, 5))
def test_as_many_hints_are_shown_as_the_learner_wants(truth, answer, hints):
    assume(not matches(answer, truth))
    verdict = exercise(truth).verdict(answer, hints=hints)
    assert verdict.startswith("not yet: think again")
    assert [hint in verdict for hint in exercise(truth).hints] == [place < hints for place in range(3)]
    assert ("another hint" in verdict) == (hints < 3)


@given(st.sets(WORDS, min_size=2), st.randoms(use_true_random=False))
def test_a_set_is_compared_in_any_order_and_a_list_in_its_own(words, random):
    shuffled = sorted(words)
    random.shuffle(shuffled)
    for answer in (shuffled, tuple(shuffled), set(shuffled), [*shuffled, shuffled[0]]):
        assert matches(answer, words)
    assert not matches(shuffled[1:], words)
    assert not matches([*shuffled, "other"], words)
    assert not matches(shuffled[::-1], shuffled)


@given(NUMBERS)
def test_numbers_have_a_tolerance(number):
    assert matches(number * (1 + 1e-9), number)
    assert matches(np.float64(number), number)
    assert matches([torch.tensor(number, dtype=torch.float64)], [number])
    assert not matches(number * 1.01 + 0.01, number)


def test_words_ignore_case_and_spaces_and_a_truth_value_is_not_a_number():
    assert matches(" After ", "after")
    for answer, truth in (("before", "after"), (1, True), (True, 1)):
        assert not matches(answer, truth)


def to_write(numbers):
    """The learner completes this."""
    return ...  # your code


def test_code_is_open_until_the_learner_has_replaced_the_gap():
    assert exercise(3).verdict(to_write) == NOT_ATTEMPTED
    assert not is_open(exercise)
    assert not is_open(len)  # has no source


def test_an_answer_that_breaks_the_check_gets_a_sentence(capsys):
    raises = Exercise(judge=lambda answer: answer > 1, hints=("a number",), explanation="", solution=lambda: 2)
    raises.check("text")
    first = "not yet: the check raised TypeError ('>' not supported between instances of 'str' and 'int'). "
    assert capsys.readouterr().out == f"{first}Hint: a number\n"


def test_a_judge_may_return_a_sentence_of_its_own_and_an_explanation_may_depend_on_the_answer():
    small = Exercise(
        judge=lambda n: n < 3 or f"{n} is too large",
        hints=("",),
        explanation=lambda n: f"{n} is small",
        solution=lambda: 2,
    )
    assert small.verdict(7) == "not yet: 7 is too large"
    assert small.verdict(2) == "right: 2 is small"


def judged_55(hint, solution, wrong):
    return Exercise(
        judge=lambda answer: answer == 55,
        hints=("draw it", hint),
        explanation="",
        solution=lambda: solution,
        wrong=lambda: wrong,
    )


def test_verify_raises_on_a_wrong_solution_a_lenient_judge_and_a_hint_with_the_answer():
    judged_55("when does 1550 end?", 55, [54]).verify()
    with pytest.raises(AssertionError, match="54: not yet"):
        judged_55("", 54, []).verify()
    with pytest.raises(AssertionError, match="55: right"):
        judged_55("", 55, [55]).verify()
    with pytest.raises(AssertionError, match="leaks"):
        judged_55("it is 55", 55, [54]).verify()


def test_the_solution_is_shown_as_code_with_its_value_or_as_the_function_itself(capsys):
    def solution():
        steps = 2 * 3
        return steps, 1 / 3

    one = Exercise(judge=bool, hints=("",), explanation="", solution=solution)
    one.show_solution()
    assert capsys.readouterr().out == "steps = 2 * 3\nreturn steps, 1 / 3\n# 6, 0.333\n"
    exercise(to_write, code=to_write).show_solution()
    assert capsys.readouterr().out.startswith("def to_write(numbers):\n")
