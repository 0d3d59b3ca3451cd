"""Code that learners write in tutorials: how ranks import it, and which checks find its faults."""

from pathlib import Path

import pytest

from ddplab.learn import gains
from tutorials import breaking, building, own_code
from tutorials.exercises import TO_WRITE

CHECKS = ("any timing", "one weight", "construction", "bucket caps")
OURS = "ddplab.reference.data_parallel:DistributedDataParallel"
TORCHS = "torch.nn.parallel:DistributedDataParallel"
FLAT, OVERLAPPED = "ddplab.reference.minimal:FlatDataParallel", "ddplab.reference.minimal:OverlappedDataParallel"
FOLDER = own_code.FOLDER


def use(_rank: int, _world_size: int, folder: Path) -> None:
    """Let a rank import from another folder, so that tests leave the learner's modules alone."""
    own_code.FOLDER = folder


@pytest.fixture
def folder(monkeypatch, two_ranks, four_ranks, tmp_path):
    monkeypatch.setattr(own_code, "FOLDER", tmp_path)
    for pool in (two_ranks, four_ranks):
        pool.run(use, tmp_path)
    yield tmp_path
    own_code.forget()
    for pool in (two_ranks, four_ranks):
        pool.run(own_code.forget)
        pool.run(use, FOLDER)


def test_ranks_run_the_file_as_it_is_now(folder, two_ranks):
    for number in range(3):
        (folder / "step.py").write_text(f"def work(rank, world_size, factor):\n    return factor * rank + {number}\n")
        assert two_ranks.run(own_code.run, "step:work", 10) == [number, 10 + number]


def test_an_answer_is_open_while_the_module_has_a_gap(folder):
    source = "def work():\n    return {}\n"
    (folder / "filled.py").write_text(source.format(TO_WRITE))
    assert own_code.answer("filled:work") is ...
    (folder / "filled.py").write_text(source.format("1 + 1"))
    assert own_code.answer("filled:work") == "filled:work"
    assert own_code.answer("missing:work") == "missing:work"


def test_an_iteration_in_virtual_time_is_computation_and_communication_to_the_nanosecond(folder):
    sizes_bytes = gains.model().sizes_bytes
    flat_ms = building.computation_ms() + building.all_reduces_ms(sum(sizes_bytes))
    assert building.iteration_ms(FLAT) == pytest.approx(flat_ms, abs=1e-6)
    naive_ms = building.computation_ms() + building.all_reduces_ms(*sizes_bytes)
    assert building.iteration_ms("ddplab.reference.minimal:NaiveDataParallel") == pytest.approx(naive_ms, abs=1e-6)


def test_a_simple_test_and_a_loss_curve_accept_what_the_checks_refuse(folder, two_ranks, four_ranks):
    halved = breaking.source().replace("flat /= dist.get_world_size(self.process_group)", "flat /= 2")
    (folder / "halves.py").write_text(halved)
    halves = "halves:OverlappedDataParallel"
    curves = [two_ranks.run(breaking.train, name, 3) for name in (OVERLAPPED, halves)]
    assert curves[0] == curves[1]
    assert two_ranks.run(breaking.passes_simple_test, halves) == [True, True]
    last = own_code.check(four_ranks, halves, CHECKS)[-1]
    assert last.outcome == "failed"
    assert "2 times the expected value" in last.message
