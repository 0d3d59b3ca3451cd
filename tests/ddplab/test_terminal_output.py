"""Output on a terminal: tables that fit, warnings, and names that cannot control the terminal."""

import io
import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddplab.cli import terminal_output
from ddplab.cli.terminal_output import PrintableStream, fitting_columns, say, show_report, show_table
from ddplab.prediction_errors import summarize

from ..nccl_log import nccl_log
from ..validation_rows import row
from .command_process import ROOT


@given(st.data())
def test_a_table_gives_up_columns_before_it_breaks_a_word(data):
    names = data.draw(st.lists(st.text("ab ", min_size=1, max_size=9), min_size=1, max_size=6, unique=True))
    cells = st.fixed_dictionaries({name: st.text("12 ", max_size=12) for name in names})
    rows = data.draw(st.lists(cells, min_size=1, max_size=3))
    some = data.draw(st.lists(st.sampled_from([*names, "absent"]), unique=True, max_size=len(names) - 1))
    optional = [name for name in some if name in names]
    width = data.draw(st.integers(1, 60))

    def needed(columns):
        words = [[name, *(row[name] for row in rows)] for name in columns]
        longest = [max(map(len, " ".join(of_column).split()), default=0) for of_column in words]
        return sum(word + 1 for word in longest)

    kept = fitting_columns(rows, width, some)
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


@pytest.fixture
def terminal(monkeypatch):
    """Lets commands print to a terminal of so many columns (None: to none), without the lines of their tables."""
    monkeypatch.setattr(terminal_output.Console, "print", lambda *_: None)

    def of_width(columns: int | None) -> None:
        monkeypatch.setattr(PrintableStream, "isatty", lambda _: columns is not None, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns or 200))

    return of_width


PIECE = st.text("ab-_/=.", min_size=1, max_size=30) | st.sampled_from(["7.5 ms", "83-96 %", "42.3 GB"])
PASTED = st.lists(PIECE, min_size=1, max_size=20).map(lambda words: f"`{' '.join(words)}`") | st.lists(
    st.integers(0, 999), max_size=30
).map(lambda caps: f"bucket_cap_mb_list={caps}")


@given(st.lists(PIECE | PASTED, min_size=1, max_size=30), st.sampled_from([None, 20, 40, 80, 119, 300]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sentence_fits_the_terminal_and_what_readers_paste_is_in_one_line(capsys, terminal, pieces, columns):
    terminal(columns)
    sys.stdout.flush()
    with redirect_stdout(PrintableStream(sys.stdout)):
        say(" ".join(pieces))
    shown = capsys.readouterr().out
    assert " ".join(line.strip() for line in shown.splitlines()) == " ".join(pieces)
    for line in shown.splitlines():
        assert len(line) <= min(columns or 80, 120) or line.strip() in pieces
        assert line.split()[0] not in ("ms", "%", "GB")


FABRIC = ("--fabric", "{topology}")
PRINTING = [
    ("predict", "{trace}", *FABRIC, "--world-size", 4, "--explain", "--without", "copies,jitter"),
    ("predict", "{sheet}", *FABRIC, "--world-size", 4, "--explain", "--set", "sync_every=2"),
    ("predict", "{sheet}", *FABRIC, "--world-size", "2,4,64"),
    ("predict", "{sheet}", *FABRIC, "--timeline", "{out}/picture.json", "--measured", "2:900ms"),
    ("predict", "{sheet}", "--fabric", "{log}"),
    ("tune", "{sheet}", *FABRIC, "--world-size", 16, "--out", "{out}/a/rather/long/folder/of/plans/plan.json"),
    ("tune", "{trace}", *FABRIC, "--out", "{out}/plan.json", "--verify", "virtual"),
    ("synthesize", "--model", "bert-large-512", "--device", "a100", "--out", "{out}/made.json"),
    ("synthesize", "--model", "resnet50", "--device", "h100", "--step-ms", 40, "--out", "{out}/made.json"),
    ("show",),
    ("show", "settings"),
    ("show", "aws-p4d"),
    ("show", "h100"),
    ("show", "vit-b-16"),
    ("show", "{trace}"),
    ("show", "{sheet}"),
    ("show", "{topology}", "{log}"),
    ("import", "{profile}", "--out", "{out}/imported.json"),
    ("plan", "resnet50-224", "aws-p4d", "--details"),
    ("plan", "resnet50-224", "aws-p4d", "--world-size", 8, "--samples", 1e9, "--price", 2),
]


@pytest.mark.parametrize("words", PRINTING, ids=lambda words: " ".join(map(str, words)))
def test_no_sentence_of_a_command_is_wider_than_the_terminal(
    words, printed, terminal, trace, topology, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    log, sheet = Path("two.log"), Path("sheet.json.gz")
    log.write_text(nccl_log(2, {8: 8.65, 2**20: 99.25}))
    if "{sheet}" in words:
        printed("synthesize", "--model", "resnet50-224", "--device", "a100", "--out", sheet)
    profile = ROOT / "validation" / "profiler" / "a100x2_resnet50_rank0.json.gz"
    paths = {"trace": trace, "topology": topology, "log": log, "sheet": sheet, "profile": profile, "out": "out"}
    for columns in (None, 80, 40):
        terminal(columns)
        shown = printed(*(str(word).format(**paths) for word in words))
        assert shown or words == ("show", "settings")
        for line in shown.splitlines():
            alone = re.fullmatch(r"\s*\(?(`[^`]*`|\w+=\[[^]]*\]|\S+)\S*", line)  # what is never broken
            assert len(line) <= (columns or 80) or alone, line


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


def test_no_number_of_a_narrow_table_is_broken(printed, monkeypatch):
    """At 60 columns, 0.0089-0.0136 USD was 0.0089-0.013 over a 6."""
    monkeypatch.setattr(PrintableStream, "isatty", lambda _: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    prices = ("--price", "aws-p4d:2", "--price", "dgx-h100:4")
    shown = printed("plan", "gpt2", "aws-p4d", "dgx-h100", "--gpus", 64, "--details", *prices)
    rows = re.findall(r"^ *(?:aws-p4d|dgx-h100) .*", shown, re.MULTILINE)
    assert len(rows) == 10
    assert all(re.search(r" 0\.\d{4}-0\.\d{4} *$", row) for row in rows)
