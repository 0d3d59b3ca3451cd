"""Guesses of the tutorials: nothing is guessed before a control moves, marks in pictures, and the score."""

from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.explore import examples
from tutorials.guessing import CLOSE, Guesses, ask, choice, log_steps, several, slider
from tutorials.plots import mark_guess, new_axes

NUMBERS = st.lists(st.integers(-(10**6), 10**6) | st.floats(1e-3, 1e9), min_size=1, max_size=30, unique=True)
WORDS = st.lists(st.text("abc", min_size=1, max_size=3), min_size=2, max_size=4, unique=True)
QUESTIONS = (
    st.builds(slider, st.text(), NUMBERS.map(sorted), st.sampled_from(["", "ms"]))
    | WORDS.map(lambda words: choice("which", *words))
    | WORDS.map(lambda words: several("which ones", *words))
)


def answer(guess, name, value):
    """Give an answer as the learner does in JupyterLab."""
    guess.controls[name].value = value


@examples(8)
@given(QUESTIONS, QUESTIONS, st.data())
def test_a_control_offers_every_option_and_nothing_is_guessed_before_it_moves(question, other, data):
    guess = Guesses({"q": question, "other": other})
    offered = [value for _, value in guess.controls["q"].options if value != ()]
    assert offered == list(question.options)
    chosen = data.draw(st.sampled_from(question.options))
    whole = (chosen,) if question.control == "list" else chosen
    answer(guess, "q", whole)
    assert dict(guess) == {"q": whole, "other": None}
    assert question.is_right(whole, whole)
    assert 0 < question.by_chance(whole) <= 1


@given(st.floats(1e-3, 1e5), st.floats(1.1, 1e6))
def test_positions_of_a_logarithmic_slider_ascend_within_its_range_and_leave_no_wide_gap(low, ratio):
    steps = log_steps(low, low * ratio)
    assert (steps[0], steps[-1]) == (low, low * ratio)
    assert all(one < other < (1 + CLOSE) * one for one, other in pairwise(steps))


def test_guesses_outlive_a_second_run_of_the_cell(capsys):
    questions = {"one": slider("how long", range(10), "ms"), "other": choice("what", "hang", "error")}
    answer(ask(**questions), "one", 7)
    assert dict(ask(**questions)) == {"one": 7, "other": None}
    assert dict(ask(**questions, third=choice("more", 1, 2))) == {"one": None, "other": None, "third": None}
    assert "- how long: 0 ms to 9 ms\n- what: hang, error\n" in capsys.readouterr().out


def test_a_page_without_a_kernel_lists_the_questions():
    bundle = Guesses({"one": slider("how long", [0, *log_steps(1, 100)], "ms")})._repr_mimebundle_()
    assert bundle["text/markdown"] == bundle["text/plain"] == "- how long: 0 ms to 100 ms"
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_the_score_has_each_guess_beside_the_measured_value():
    guess = Guesses(
        {
            "hidden": slider("hidden", range(0, 101, 10), "%"),
            "longer": slider("times as long", range(3)),
            "outcome": choice("outcome", "hang", "error"),
            "arrive": several("arrive", "a", "b"),
            "busy": slider("takes", range(3), "ms"),
        }
    )
    answer(guess, "hidden", 60)
    answer(guess, "outcome", "hang")
    answer(guess, "arrive", ("b", "a"))
    answer(guess, "busy", 1)
    measured = {"hidden": 71.25, "longer": 1234.5, "outcome": "wrong", "arrive": {"a"}, "busy": None}
    assert repr(guess.score("predicted", **measured)).startswith("| question | you | predicted | right? |\n")
    assert repr(guess.score(**measured)).splitlines() == [
        "| question | you | measured | right? |",
        "| --- | --- | --- | --- |",
        "| hidden | 60 % | 71.2 % | yes |",
        "| times as long | no guess | 1234 |  |",
        "| outcome | hang | wrong | no |",
        "| arrive | a, b | a | no |",
        "| takes | 1 ms | machine too busy |  |",
        "",
        "1 of 3 guesses are right, numbers on sliders within 25 %. "
        "Answers drawn by lot would be right in 0.7 of 3 cases on average.",
    ]
    with pytest.raises(ValueError, match="expected a value for each of hidden, longer"):
        guess.score(hidden=1)


@given(st.floats(1, 100), st.floats(0.5, 2))
def test_a_number_is_right_if_it_is_close_on_a_slider_and_equal_on_a_button(value, ratio):
    assume(abs(ratio - 4 / 3) > 0.01 and abs(ratio - 3 / 4) > 0.01)
    assert slider("takes", range(200), "ms").is_right(value * ratio, value) == (3 / 4 < ratio < 4 / 3)
    assert choice("faults", *range(200)).is_right(value * ratio, value) == (value * ratio == value)


@pytest.fixture
def ax():
    ax = new_axes()
    ax.plot([1, 100], [0, 50])
    ax.set_xscale("log")
    yield ax
    plt.close(ax.figure)


@pytest.mark.parametrize(
    ("guess", "marker", "height"), [(20, "D", 20), (0, "D", 0), (9000, "^", 60), (-9000, "v", -10)]
)
def test_a_guess_is_marked_in_the_picture_or_by_an_arrow_head_at_its_edge(ax, guess, marker, height):
    ax.set_ylim(-10, 60)
    limits, before = ax.get_xlim(), ax.get_children()
    mark_guess(ax, None, "ms", x=10)
    assert ax.get_children() == before
    mark_guess(ax, guess, "ms", x=10)
    mark = ax.lines[-1]
    assert mark.get_marker() == marker
    assert [*mark.get_xdata(), *mark.get_ydata()] == pytest.approx([10, height])
    assert [text.get_text() for text in ax.texts] == [f"you: {guess} ms"]
    assert (ax.get_xlim(), ax.get_ylim()) == (limits, (-10, 60))


def test_the_other_coordinate_is_the_guess_in_the_units_of_the_axis_unless_both_are_given(ax):
    mark_guess(ax, 20, "%", y=5, scale=1 / 2)
    mark_guess(ax, "hang", x=2, y=3)
    assert [(*line.get_xdata(), *line.get_ydata()) for line in ax.lines[1:]] == [
        pytest.approx((10, 5)),
        pytest.approx((2, 3)),
    ]
    assert [text.get_text() for text in ax.texts] == ["you: 20 %", "you: hang"]
