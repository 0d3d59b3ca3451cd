"""The board: its files, our method from the files alone, methods of others, and the kept answers."""

import gzip
import json
import re
from dataclasses import replace

import pytest

from ddplab.reference.trace import Trace
from ddplab.simulator.baseline_predictions import BASELINES
from validation import board, board_files, board_methods, part_fg_runs, part_h_profiles
from validation.board import BOARD, Answered, Answers, rows, truths
from validation.cases import AllReduceCase, load_case
from validation.comparison import mean_absolute
from validation.score import score_case

pytestmark = pytest.mark.timeout(900)  # the first test that needs the score computes it


@pytest.fixture(scope="module")
def entries():
    return board_files.all_entries()


@pytest.fixture(scope="module")
def score():
    cases = [load_case(path) for path in sorted(board_files.CASES.glob("*.toml"))]
    scored = [score_case(case) for case in cases if not isinstance(case, AllReduceCase)]
    scored += [part_fg_runs.score(run) for run in part_fg_runs.committed_runs()]
    scored += [part_h_profiles.score(path) for path in part_h_profiles.profiles()]
    return [row for one in scored for row in one.rows if row.counts]


@pytest.fixture(scope="module")
def answers():
    return board.answer(board_methods.ours, "validation.board_methods:ours")


def test_the_files_are_those_that_the_maker_makes(entries):
    made = board_files.files(entries)
    kept = {str(path.relative_to(BOARD)) for path in BOARD.rglob("*") if path.is_file() and path.name != "README.md"}
    assert {name for name in kept if not name.startswith("answers/")} == set(made)
    for name, content in made.items():
        data = (BOARD / name).read_bytes()
        if name.endswith(".gz"):  # compressed bytes may depend on the version of zlib
            data, content = gzip.decompress(data), gzip.decompress(content)
        assert data == content, name


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in BOARD.rglob("*") if path.is_file()) < 3e6


def slower(case):
    """The same case with other truths."""
    fields = ("per_s", "ms")
    truths = []
    for truth in case.truth:
        values = {name: getattr(truth, name) for name in fields if hasattr(truth, name)}
        changed = {n: tuple(2 * ms for ms in v) if isinstance(v, tuple) else 2 * v for n, v in values.items()}
        truths.append(truth.model_copy(update=changed))
    return case.model_copy(update={"truth": tuple(truths)})


def test_no_input_depends_on_a_published_truth():
    cases = [load_case(path) for path in sorted(board_files.CASES.glob("*.toml"))]
    cases = [case for case in cases if hasattr(case, "truth")]
    one, other = (board_files.files(board_files.entries(some, [], [])) for some in (cases, map(slower, cases)))
    assert one.pop("truth.csv") != other.pop("truth.csv")
    assert one == other


def test_no_input_depends_on_what_a_run_measured(monkeypatch):
    folders = sorted(path.parent for path in part_fg_runs.RUNS.glob("*/report.json"))[::4]
    as_it_is = board_files.files(board_files.entries([], folders, []))
    read = part_fg_runs.RunFiles.read

    def slowed(folder):
        files = read(folder)
        turns = [
            [turn._replace(times_ns=tuple(2 * ns for ns in turn.times_ns)) for turn in row.turns]
            for row in files.recorded.rows
        ]
        changed = [replace(row, turns=tuple(new)) for row, new in zip(files.recorded.rows, turns, strict=True)]
        return files._replace(recorded=replace(files.recorded, rows=tuple(changed)))

    monkeypatch.setattr(part_fg_runs.RunFiles, "read", slowed)
    changed = board_files.files(board_files.entries([], folders, []))
    assert as_it_is.pop("truth.csv") != changed.pop("truth.csv")
    assert as_it_is == changed


def test_the_trace_of_a_profiled_step_has_no_waits_and_no_end_of_the_step():
    """A step that waited longer for its all-reduces, and so ended later, has the same trace."""
    (path,) = part_h_profiles.PROFILES.glob("a100x2*.json.gz")
    step = part_h_profiles.stated(path)[0].trace
    later = json.loads(step.model_dump_json())
    moments = later["ranks"][0]["iterations"][0]
    waited = 10**9
    for name in ("backward_end_ns", "optimizer_start_ns", "optimizer_end_ns", "end_ns"):
        moments[name] = moments[name] and moments[name] + waited
    moments["buckets"][-1] |= {
        name: moments["buckets"][-1][name] + waited
        for name in ("done_ns", "copied_out_ns")
        if moments["buckets"][-1][name]
    }
    later = Trace.model_validate_json(json.dumps(later))
    assert part_h_profiles.duration_ns(later) == part_h_profiles.duration_ns(step) + waited
    assert board_files.ORIGINAL.trace(later, 1) == board_files.ORIGINAL.trace(step, 1)


def test_our_answers_from_the_files_alone_are_the_scores(score, answers):
    for row, scored in zip(rows(), score, strict=True):
        answered, measured = answers.of[row.name], truths()[row.name]
        assert (row.part, row.system) == (scored.part, scored.case)
        # The times of (f) are those of the scale model, so errors are compared; both are rounded to nanoseconds.
        assert answered.ms / measured - 1 == pytest.approx(scored.error, abs=1e-6), row.name
        assert (answered.interval_ms is None) == (scored.interval_ns is None)
        if answered.interval_ms is not None:
            expected = [ns / scored.measured_ns for ns in scored.interval_ns]
            assert [ms / measured for ms in answered.interval_ms] == pytest.approx(expected, abs=1e-6), row.name
        if row.part != "f":
            assert measured == pytest.approx(scored.measured_ns / 1e6, rel=1e-6)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_from_the_files_alone_are_the_scores(score, name):
    """Two are others: the score has DDP's copies in *no overlap* of (f) and (g), and in (b) a step without DDP."""
    other = {"no overlap": "fg", "perfect scaling": "bfg"}.get(name, "")
    method = getattr(board_methods, name.replace(" ", "_"))
    for row, scored in list(zip(rows(), score, strict=True))[::3]:
        if row.part not in other:
            error = method(row) / truths()[row.name] - 1
            assert error == pytest.approx(scored.baseline_error(name), abs=1e-6), row.name


def test_our_kept_answers_are_those_of_the_method(answers):
    kept = board.kept_answers()["ddplab"]
    assert list(kept.of) == list(answers.of)
    for name, one in answers.of.items():
        assert kept.of[name].ms == pytest.approx(one.ms, rel=1e-5), f"{name}: run the method with --out"
        assert kept.of[name].interval_ms == (one.interval_ms and pytest.approx(one.interval_ms, rel=1e-5))


@pytest.mark.parametrize("name", [*(name.replace(" ", "_") for name in BASELINES), "links_only"])
def test_kept_answers_of_simple_methods_are_those_of_the_methods(name):
    kept, method = board.kept_answers()[name], getattr(board_methods, name)
    for row in rows()[::7]:
        assert kept.of[row.name].ms == pytest.approx(method(row), rel=1e-5), f"{row.name}: run the method with --out"


def test_every_kept_answer_is_to_a_row():
    for answers in board.kept_answers().values():
        assert set(answers.of) <= set(truths())


def test_the_method_of_the_readme_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (BOARD / "README.md").read_text(), re.S)
    (tmp_path / "my_method.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "answers.csv"
    board.main(["--method", "my_method:method", "--out", str(out)])
    printed = capsys.readouterr().out
    answers = Answers.load(out)
    taken = answers.taken()
    assert 150 < len(taken) < len(rows())
    mean = mean_absolute([row.error for row in board.compared(answers, taken)])
    assert f"{mean:.1%}" in printed
    assert f"{len(rows()) - len(taken)} rows left out: needs links, and an iteration on one GPU" in printed


def test_without_a_method_all_kept_answers_are_shown(capsys):
    board.main([])
    printed = capsys.readouterr().out
    assert all(name.replace("_", " ") in printed for name in board.kept_answers())


def test_answers_survive_their_file(tmp_path):
    of = {
        rows()[0].name: Answered(12.5, (10.0, 20.0), 0.25),
        rows()[1].name: Answered(7.0, None, 1.0),
        rows()[2].name: Answered(None, None, 0.5, "no links, and so no answer"),
    }
    answers = Answers("some.module:method", "0123abc", "2026-11-29", of)
    (tmp_path / "some.csv").write_bytes(answers.to_csv())
    assert Answers.load(tmp_path / "some.csv") == answers


def test_a_file_of_five_columns_is_enough(tmp_path):
    (tmp_path / "some.csv").write_text(f'name,ms,low_ms,high_ms,seconds\n"{rows()[0].name}",12.5,,,0.25\n')
    assert Answers.load(tmp_path / "some.csv").of == {rows()[0].name: Answered(12.5, None, 0.25)}


def test_intervals_are_scored_where_a_method_gives_some():
    measured = truths()

    def method(row):
        ms = measured[row.name]
        return (1.1 * ms, ms, 1.2 * ms) if row.part == "i" else 0.9 * ms if row.part == "d" else None

    answers = board.answer(method, "method")
    all_rows, *_ = table = board.method_table(answers, board.kept_answers()["ddplab"])
    assert all_rows["rows"] == str(79 + 93)
    assert all_rows["mean error"].startswith("10.0% (")
    assert all_rows["inside"].startswith("79/79 (")
    assert all_rows["interval score"].startswith("20% (")
    assert {line["name"] for line in table} > {"(d)", "(i)", "(i) CSC Mahti, A100"}
    assert next(line for line in table if line["name"] == "(d)")["inside"] == ""


def test_a_method_that_does_not_exist_is_one_line():
    with pytest.raises(SystemExit, match=r"expected module:function, got validation\.board:missing"):
        board.main(["--method", "validation.board:missing"])


COMPARED = {
    "Proteus": "proteus",
    "our trace in ASTRA-sim": "astra_sim",
    "the same, with our GPU costs": "astra_sim_with_our_gpu_costs",
    "our trace in LogGOPSim": "loggopsim",
    "our trace in SimAI": "simai",
    "Calculon": "calculon",
    "Primus": "primus",
}


def test_the_page_that_compares_predictors_has_the_figures_of_the_board():
    kept, text = board.kept_answers(), (BOARD.parents[2] / "docs" / "comparison.md").read_text()
    lines = text.partition("| tool, revision |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(lines) == len(COMPARED)
    table = {one["name"]: one for one in board.board_table(kept)}
    for line in lines:
        named, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        name = next(name for name in COMPARED if named.startswith(name))
        answers = kept[COMPARED[name]]
        assert named in (name, f"{name} {answers.revision[:7]}")
        one = table[COMPARED[name].replace("_", " ")]
        columns = ("rows", "mean error", "ddplab", "pipelined", "links only", "seconds, median")
        assert [cell.replace(" %", "%") for cell in shown] == [one[column] for column in columns]


def test_the_page_names_each_system_on_which_another_is_closer():
    kept, text = board.kept_answers(), (BOARD.parents[2] / "docs" / "comparison.md").read_text()
    section = text.partition("## Where another is closer")[2].partition("\n## ")[0]
    for name in COMPARED.values():
        systems: dict[str, list[board.Row]] = {}
        for row in kept[name].taken():
            systems.setdefault(row.system, []).append(row)
        for system, of in systems.items():
            theirs, ours = (
                mean_absolute([one.error for one in board.compared(kept[method], of)]) for method in (name, "ddplab")
            )
            if len(of) >= board.LEAST_ROWS and theirs < ours:
                assert any(word in section for word in re.split(r"[ ,]+", system) if len(word) > 3), (name, system)
