"""Outcomes of checks: problems, expectations, and the script of a fault."""

import re
import runpy
from functools import partial
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddplab.conformance.check_outcomes import (
    SEEDED,
    CheckResult,
    ConformanceReport,
    Expectation,
    Outcome,
    read_expectations,
    why_left_out,
    write_script,
)
from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.random_programs import programs
from ddplab.reference.files.writing import printable

from ..explore import examples


def test_after_two_checks_in_which_ranks_hang_all_others_are_left_out():
    hung = [CheckResult(name, "failed", "ranks [0] were still running", unmatched=True) for name in ("a", "b")]
    wrong = CheckResult("a", "failed", "0.5 times the expected value")
    assert why_left_out("random programs", hung) == "the ranks did not match in a and b"
    assert why_left_out("random programs", hung[:1]) == ""
    assert why_left_out("random programs", [wrong] * 5) == ""


@pytest.mark.parametrize(
    ("outcome", "expected", "problem"),
    [
        ("passed", None, ""),
        ("passed", "must-pass", ""),
        ("passed", "expected-fail", "a: passed, but was expected to fail; remove it from the file"),
        ("failed", None, "a: why"),
        ("failed", "must-pass", "a: why"),
        ("failed", "expected-fail", ""),
        ("not supported", None, ""),
        ("not supported", "must-pass", "a: must pass, but is not supported: why"),
        ("left out", None, ""),
        ("left out", "must-pass", "a: must pass, but was left out: why"),
    ],
)
def test_a_problem_is_an_outcome_that_is_not_as_expected(outcome, expected, problem):
    assert CheckResult("a", outcome, "why", expected=expected).problem == problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected the lists must-pass, expected-fail, skip: input should be a valid dictionary"),
        ("a: 3", "expected the lists"),
        ("must: [a]", "got 'must'"),
        ("skip: [z]", "skip: expected one of a, b; got 'z'"),
        ("skip: [a]\nmust-pass: [a]", "a is in two lists"),
        ("skip: [", "skip: line 2: did not find expected node content"),
        ("\x00", "skip: unacceptable character"),
        ("class: m:D\nskip: [a]", "class: expected m:C, got 'm:D'; write a file with --save-expect"),
        ("class: [m:C]", r"class: expected m:C, got \['m:C'\]"),
    ],
)
def test_expectations_that_make_no_sense_are_told_in_one_line(tmp_path, text, message):
    path = tmp_path / "expect.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_expectations(path, ["a", "b"], "m:C")
    assert "\n" not in str(error.value)
    path.write_text("class: m:C\nmust-pass: [a]\nexpected-fail: [b]\nskip: []\n")
    assert read_expectations(path, ["a", "b"], "m:C") == {"a": "must-pass", "b": "expected-fail"}


def test_a_failure_below_the_level_is_no_problem_unless_the_check_must_pass():
    failed = partial(CheckResult, "overlap", "failed", "why", decides=False)
    assert [failed(expected=one).problem for one in (None, "expected-fail", "must-pass")] == ["", "", "overlap: why"]


@example([CheckResult("a", "passed", decides=False)], "")
@example([CheckResult("a", "failed", "why", decides=False)], "")
@given(st.lists(st.builds(CheckResult, st.sampled_from(["overlap", "a"]), st.sampled_from(get_args(Outcome)),
                          st.just("why"), decides=st.booleans())), st.sampled_from(["", "it ended"]))  # fmt: skip
def test_the_last_line_denies_no_line_above_it(results, ended):
    """It says that the class conforms only if something that decides was judged, and nothing of that failed."""
    report = ConformanceReport(subject="m:C", needs_schedules=False, results=results, ended=ended)
    says = str(report)
    decided = [one for one in results if one.outcome == "failed" and one.decides]
    ran = any(one.outcome in ("passed", "failed") and one.decides for one in results)
    assert ("conforms" in says) == (ran and not decided and not ended)
    assert ("could not be judged" in says) == (not ran or bool(ended and not decided))
    assert ("failed at level" in says) == ("conforms" in says and any(one.outcome == "failed" for one in results))
    for outcome in ("not supported", "left out"):
        if "conforms" in says:
            assert (outcome in says) == any(one.outcome == outcome for one in results)


OUTCOMES = st.builds(
    partial(CheckResult, message="why"),
    st.sampled_from("abc"),
    st.sampled_from(get_args(Outcome)),
    expected=st.sampled_from([None, *get_args(Expectation)]),
)


@given(st.lists(OUTCOMES, max_size=4), st.booleans())
def test_a_problem_that_no_line_above_tells_is_in_the_last_line(results, needs_schedules):
    report = ConformanceReport(subject="m:C", needs_schedules=needs_schedules, results=results)
    told = {one.problem for one in results if one.outcome == "failed"}
    assert not report.problems or told & set(report.problems) or report.problems[0] in str(report)


CHARACTERS = st.characters() | st.sampled_from("\x00\x1b\r\n\ud800\udcff\ufffe\"'\\{}<&]")
"""What an exception may contain: any characters, also surrogates."""


@examples(10)
@given(programs(3), st.text(CHARACTERS, max_size=30))
def test_the_script_of_a_fault_has_its_program_and_its_message_whatever_that_says(tmp_path_factory, program, text):
    path = tmp_path_factory.mktemp("script") / "fault.py"
    asked = (Subject("m:C", tolerance=0.01), 9, "n:D", 0)
    write_script(path, {"world_size": 3}, asked, CheckResult(f"b{SEEDED}7", "failed", text, program))
    script = runpy.run_path(str(path))
    assert (script["PROGRAM"], script["MESSAGE"]) == (program, text)
    assert (script["RANKS"], script["ASKED"], script["CHECK"]) == ({"world_size": 3}, (*asked[:3], 7), "b")


@given(st.text(CHARACTERS))
def test_a_printable_text_can_be_written_and_differs_only_where_it_must(text):
    assert re.fullmatch(r"[\t\n -~\xa0-\U0010ffff]*", printable(text).encode().decode())
    assert printable(printable(text)) == printable(text)
