"""Guesses of the tutorials: questions with sliders and buttons in JupyterLab, and their score at the end.

A slider starts at "no guess", left of its first position, and no button is pressed at the start. The guess is then
None, for which `plots.mark_guess` draws nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations
from math import ceil, log10
from typing import Any, Literal

import numpy as np
from IPython.display import display
from ipywidgets import HTML, Layout, SelectionSlider, SelectMultiple, ToggleButtons, VBox

from .exercises import matches, shown

CLOSE = 0.25
"""Relative error at which a number on a slider is right."""
NOTHING = ()
"""Value of a control without a guess; `SelectionSlider` does not accept None."""
STEPS_OF_A_DECADE = 24
"""Neighbouring positions of `log_steps` differ by a tenth."""


@dataclass(frozen=True)
class Question:
    """A question, and the answers from which the learner chooses; made by `slider`, `choice` or `several`.

    Attributes:
        words: The question.
        options: Numbers on a slider from left to right, or the labels of buttons.
        unit: Unit of the numbers; may be empty.
        control: How the learner answers. "list": by any number of the options.
    """

    words: str
    options: tuple[Any, ...]
    unit: str = ""
    control: Literal["slider", "buttons", "list"] = "slider"

    def __str__(self) -> str:
        """The question as text, for pages that cannot show a control."""
        labels = self.labels
        return f"{self.words}: {f'{labels[0]} to {labels[-1]}' if self.control == 'slider' else ', '.join(labels)}"

    @property
    def prompt(self) -> str:
        """The question above its control."""
        return f"{self.words} (Ctrl or ⌘ selects several)" if self.control == "list" else self.words

    @property
    def labels(self) -> list[str]:
        """The options with their unit."""
        return [self._label(option) for option in self.options]

    def in_words(self, answer: Any) -> str:
        """An answer with its unit."""
        parts = [option for option in self.options if option in answer] if self.control == "list" else [answer]
        return ", ".join(map(self._label, parts))

    def _label(self, option: object) -> str:
        return f"{shown(option)} {self.unit}".strip()

    def is_right(self, answer: object, measured: Any) -> bool:
        """Whether an answer equals the measured value, on a slider within `CLOSE`."""
        if self.control == "slider":
            return matches(answer, measured, tolerance=CLOSE)
        return matches(answer, set(measured) if self.control == "list" else measured)

    def by_chance(self, measured: object) -> float:
        """The part of all possible answers that is right."""
        answers: Iterable[Any] = self.options
        if self.control == "list":
            answers = chain(*(combinations(self.options, size) for size in range(1, len(self.options) + 1)))
        right = [self.is_right(answer, measured) for answer in answers]
        return sum(right) / len(right)

    def new_control(self) -> Any:
        """A new slider, row of buttons or list."""
        options = list(zip(self.labels, self.options, strict=True))
        layout = Layout(width="auto", max_width="40em")
        if self.control == "list":
            return SelectMultiple(options=options, rows=len(options), layout=layout)
        if self.control == "buttons":
            return ToggleButtons(options=options, value=None, style={"button_width": "auto"})
        return SelectionSlider(options=[("no guess", NOTHING), *options], layout=layout)


def slider(words: str, positions: Iterable[float], unit: str = "") -> Question:
    """A question that is answered by one of many numbers, in this unit."""
    return Question(words, tuple(positions), unit)


def choice(words: str, *options: object) -> Question:
    """A question that is answered by one of a few options."""
    return Question(words, options, control="buttons")


def several(words: str, *options: object) -> Question:
    """A question that is answered by some of a few options."""
    return Question(words, options, control="list")


def log_steps(low: float, high: float) -> tuple[float, ...]:
    """Ascending positions of a logarithmic slider from `low` to `high`, with two significant digits."""
    count = ceil(STEPS_OF_A_DECADE * log10(high / low)) + 1
    inner = [float(f"{value:.2g}") for value in np.geomspace(low, high, count)[1:-1]]
    return (low, *sorted({value for value in inner if low < value < high}), high)


class Guesses(Mapping[str, Any]):
    """The learner's guesses by the name of the question, as the controls stand now; None: no guess.

    JupyterLab displays the controls, and a page without a kernel a list of the questions.
    """

    def __init__(self, questions: Mapping[str, Question]) -> None:
        self.questions = dict(questions)
        self.controls = {name: question.new_control() for name, question in questions.items()}
        rows = [[HTML(question.prompt), self.controls[name]] for name, question in questions.items()]
        self.box = VBox(list(chain(*rows)))

    def __getitem__(self, name: str) -> Any:
        value = self.controls[name].value
        return None if value == NOTHING else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.questions)

    def __len__(self) -> int:
        return len(self.questions)

    def __repr__(self) -> str:
        return "\n".join(f"- {question}" for question in self.questions.values())

    def _repr_mimebundle_(self, **_selected: object) -> dict[str, Any]:
        return {**self.box._repr_mimebundle_(), "text/plain": repr(self), "text/markdown": repr(self)}

    def score(self, source: str = "measured", /, **measured: Any) -> "Score":
        """Compare all guesses with the values that the notebook computed.

        Args:
            source: Where the values come from, the heading of their column, such as "predicted".
            measured: By name of the question; None: not measured, because the machine is too busy.

        Raises:
            ValueError: The names are not those of the questions.
        """
        if measured.keys() != self.questions.keys():
            raise ValueError(f"expected a value for each of {', '.join(self.questions)}, got {', '.join(measured)}")
        table = [f"| question | you | {source} | right? |", "| --- | --- | --- | --- |"]
        given, right, by_chance = 0, 0, 0.0
        for name, question in self.questions.items():
            guess, value, verdict = self[name], measured[name], ""
            if guess is not None and value is not None:
                is_right = question.is_right(guess, value)
                verdict = "yes" if is_right else "no"
                given, right, by_chance = given + 1, right + is_right, by_chance + question.by_chance(value)
            you = "no guess" if guess is None else question.in_words(guess)
            found = "machine too busy" if value is None else question.in_words(value)
            table.append(f"| {question.words} | {you} | {found} | {verdict} |")
        sentence = (
            f"{right} of {given} guesses are right, numbers on sliders within {100 * CLOSE:.0f} %. "
            f"Answers drawn by lot would be right in {by_chance:.1f} of {given} cases on average."
        )
        return Score("\n".join([*table, "", sentence if given else "No guess was recorded."]))


@dataclass(frozen=True)
class Score:
    """A table of guesses and measured values with a sentence, which JupyterLab displays as a table.

    Attributes:
        markdown: The table and the sentence.
    """

    markdown: str

    def __repr__(self) -> str:
        return self.markdown

    def _repr_markdown_(self) -> str:
        return self.markdown


@cache
def _kept(questions: tuple[tuple[str, Question], ...]) -> Guesses:
    """The same guesses for the same questions, so that they outlive a second run of the cell."""
    return Guesses(dict(questions))


def ask(**questions: Question) -> Guesses:
    """Display questions and return the guesses, which change whenever the learner moves a control."""
    guesses = _kept(tuple(questions.items()))
    display(guesses)  # type: ignore[no-untyped-call]
    return guesses
