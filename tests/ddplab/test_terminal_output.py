"""Output on a terminal: tables that fit, warnings, and names that cannot control the terminal."""

import io
import re
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.cli.terminal_output import PrintableStream, fitting_columns, show_report, show_table
from ddplab.prediction_errors import summarize

from ..validation_rows import row


@given(st.data())
def test_a_table_gives_up_columns_before_it_breaks_a_word(data):
    names = data.draw(st.lists(st.text("ab ", min_size=1, max_size=9), min_size=1, max_size=6, unique=True))
    cells = st.fixed_dictionaries({name: st.text("12 ", max_size=12) for name in names})
    rows = data.draw(st.lists(cells, min_size=1, max_size=3))
    optional = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names) - 1))
    width = data.draw(st.integers(1, 60))

    def needed(columns):
        words = [[name, *(row[name] for row in rows)] for name in columns]
        longest = [max(map(len, " ".join(of_column).split()), default=0) for of_column in words]
        return sum(word + 1 for word in longest)

    kept = fitting_columns(rows, width, optional)
    gone = optional[: len(names) - len(kept)]
    assert kept == [name for name in rows[0] if name not in gone]
    assert needed(kept) <= width or gone == optional
    assert not gone or needed([name for name in names if name not in gone[:-1]]) > width


def test_a_table_names_the_columns_that_it_leaves_out(capsys):
    rows = [{"cap": "5 MB", "hook": "none", "iteration ms": "5" * 116}]
    show_table(rows, "title", optional=("hook",))
    assert capsys.readouterr().out.splitlines()[-1] == "left out, because the terminal has 120 columns: hook"


def test_a_report_has_error_interval_and_noise_floor_and_warns_of_wide_intervals(capsys):
    show_report(summarize([row(1, 100, 104), row("plan", 90, 93), row("default", 120, 120)], "abc"))
    shown = capsys.readouterr().out
    for part in ("interval", "+4.0%", "noise floor: nine in ten", "gain of the plan over torch's default: 25.0%"):
        assert part in shown
    assert "intervals are wide" not in shown
    wide = replace(row(1, 100, 100), interval_ns=(80, 120))
    show_report(summarize([wide], "abc"))
    assert "intervals are wide" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@given(st.text(min_size=1, max_size=10))
def test_names_cannot_control_the_terminal(encoding, name):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding)
    with redirect_stdout(PrintableStream(stream)):
        print(f"\x1b[31m{name} \u202e", end="")
        show_table([{"name": "[fp16] :smile:"}], "title")
    stream.flush()
    shown = written.getvalue().decode(encoding)
    assert shown.startswith(r"\x1b[31m")
    assert re.search(r"\[fp16\]\s+:smile:", shown)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)
