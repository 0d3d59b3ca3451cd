"""Names and features that scripts and libraries know from torch's class: groups, torch.compile, attributes."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import ddplab

from ..explore import examples
from ..scenarios import assert_same, assert_same_pairs
from ..strategies import caps_mb
from . import drop_in_bodies

modes = st.fixed_dictionaries({"bucket_cap_mb": caps_mb(), "gradient_as_bucket_view": st.booleans()})


# Process groups


@examples(5)
@given(
    st.lists(st.sampled_from([(0, 1), (2, 3), (1, 2, 3), (0, 1, 2, 3), (3,)]), min_size=1, max_size=3),
    st.fixed_dictionaries({"gradient_as_bucket_view": st.booleans(), "find_unused_parameters": st.booleans()}),
    st.booleans(),
)
def test_a_module_trains_on_in_a_new_process_group(four_ranks, groups, options, fails):
    """As under torch's class, to rounding: its buckets are rebuilt later than ours. Also after an exception."""
    for rank, (ours, torchs, rebuilt) in enumerate(
        four_ranks.run(drop_in_bodies.update_groups, groups, options, fails)
    ):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
        if rank in groups[-1]:
            assert rebuilt == (not options["find_unused_parameters"])


def test_reductions_in_low_precision_follow_the_module_into_a_new_group(four_ranks):
    assert four_ranks.run(drop_in_bodies.update_with_a_comm_hook) == [[1.5, 0.5]] * 2 + [[1.5]] * 2


# Features switched on after construction


@examples(8)
@given(modes, st.booleans())
def test_a_graph_that_is_declared_static_after_construction(two_ranks, mode, search):
    """One parameter is unused, which the first iteration shows; the second declaration is one too many."""
    body = drop_in_bodies.static_graph_later
    assert_same_pairs(two_ranks.run(body, mode | {"find_unused_parameters": search}))


# torch.compile


@pytest.mark.parametrize("order", ["wrapper", "module"])
def test_compiled_modules_see_the_bits_of_torchs_class(two_ranks, order):
    """A compiled wrapper and a wrapped compiled module; graphs are split at the same buckets, so both overlap."""
    for (ours, our_graphs), (torchs, torch_graphs) in two_ranks.run(drop_in_bodies.compiled, order):
        assert_same(ours, torchs)
        assert our_graphs == torch_graphs > 1


@pytest.mark.parametrize("order", ["wrapper", "module"])
def test_compiled_modules_work_in_low_precision(two_ranks, order):
    assert_same_pairs(two_ranks.run(drop_in_bodies.compiled_in_low_precision, order))


def test_torchs_replicate_works_on_our_class(two_ranks):
    assert_same_pairs(two_ranks.run(drop_in_bodies.replicated))


# Names and attributes


def test_optimisers_in_backward_are_set_up_once_whatever_forward_comes_first(two_ranks):
    assert two_ranks.run(drop_in_bodies.forward_before_training) == [1, 1]


def test_private_names_that_are_missing(two_ranks):
    """What tools may ask of torch's class and not of ours, by version; all other names are there."""
    lines = Path(__file__).with_name("names_missing.txt").read_text().splitlines()
    listed = {name: SpecifierSet(versions) for name, _, versions in (line.partition(" ") for line in lines)}
    here = Version(torch.__version__).base_version
    for missing, _ in two_ranks.run(drop_in_bodies.names_missing):
        assert missing == [name for name, versions in listed.items() if here in versions]


def test_attributes_that_are_computed_and_so_missing_in_vars(two_ranks):
    """All are properties, because they change with the module, the options or the reducer."""
    changing = {
        *("_delay_all_reduce_params", "_has_rebuilt_buckets", "_module_parameters", "logger", "parameters_to_ignore"),
        *("bucket_bytes_cap", "bucket_bytes_cap_default", "bucket_bytes_cap_list", "batched_grad_copy"),
        *("find_unused_parameters", "gradient_as_bucket_view", "skip_all_reduce_unused_params", "static_graph"),
        *("modules_buffers", "named_module_buffers", "broadcast_buffers"),
        *("lazy_bucket_allocation", "require_manual_backward_finalization"),  # of torch 2.15
    }
    for _, computed in two_ranks.run(drop_in_bodies.names_missing):
        assert changing.issuperset(computed)


def test_attributes_that_torch_lets_scripts_set(two_ranks):
    """Those that have an effect in torch have it here; the others are fixed at construction, and say so."""
    for seen in two_ranks.run(drop_in_bodies.attributes_that_torch_lets_scripts_set):
        assert seen["unused"] is None
        assert seen["synchronized"] == [True, False]
        assert len(seen["refused"]) == 4
        assert all("cannot be changed after construction" in message for message in seen["refused"])
        assert seen["moved"] == ([1.0, 1.0], {"scale": 2})


# Being torch's class


def test_clients_take_the_wrapper_for_torchs_class(two_ranks):
    """Trainers, checkpoints and torch.compile ask isinstance; subclasses may use any name that torch's lacks."""
    for seen in two_ranks.run(drop_in_bodies.as_torchs):
        assert all(seen["instances"])
        assert seen["subclass"]
        assert seen["active"] == [True, None]
        assert seen["passed"] == [3, 4, "a subclass's own", True]
        assert seen["names"] == [
            *("_added_slots", "_check_parameters", "_ddp_log", "_forward_parameters", "_frozen_slots"),
            *("_has_buffers", "_make_reducer", "_reducer", "_registrations", "_set_up", "_trained_slots"),
        ]
        assert seen["keys"] == ["features.weight", "features.bias"]
        first, passing, _, *copies = seen["trained"]
        assert_same([first] * len(copies), copies)
        assert_same(first, passing)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_stages_of_a_pipeline_are_averaged_over_their_replicas(four_ranks, schedule):
    for got, expected in four_ranks.run(drop_in_bodies.pipelined, schedule):
        torch.testing.assert_close(got, expected)


def test_a_wrapper_that_torchs_class_has_saved_says_how_to_load_it(two_ranks):
    assert all("wrap its .module again" in error for error in two_ranks.run(drop_in_bodies.saved_by_torchs_class))


def test_our_class_in_torchs_place(two_ranks):
    """Under every name that a client imports; torch.compile splits graphs at buckets all the same."""
    for inside, after in two_ranks.run(drop_in_bodies.replaced):
        *names, graphs = inside
        assert set(names) == {"ddplab.reference.data_parallel"}
        assert after == [*["torch.nn.parallel.distributed"] * 3, graphs]
        assert graphs > 1


SPAWNS = """
import os, subprocess, sys
import torch.multiprocessing as mp

def rank(index):
    from torch.nn.parallel import DistributedDataParallel as DDP
    print(index, DDP.__module__)

if __name__ == "__main__":
    if len(sys.argv) == 1:
        mp.spawn(rank, nprocs=1)
        subprocess.run([sys.executable, __file__, "alone"], check=True)
        quick = "import sys; import site_of_the_user; print('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", quick], check=True)
    else:
        rank(1)
"""


def test_ranks_that_a_script_starts_itself_have_our_class_too(tmp_path, monkeypatch):
    """Other Python processes do not load torch, and a `sitecustomize` of the user's still runs."""
    (tmp_path / "train.py").write_text(SPAWNS)
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['site_of_the_user'] = sys")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = [sys.executable, "-m", "ddplab.replace_ddp", tmp_path / "train.py"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    ours = "ddplab.reference.data_parallel"
    assert sorted(ran.stdout.splitlines()) == [f"{index} {ours}" for index in range(2)] + ["False"], ran.stderr


def test_a_context_inside_another_leaves_our_class_in_place():
    with ddplab.replace_ddp():
        with ddplab.replace_ddp():
            pass
        from torch.nn.parallel import DistributedDataParallel as Inside
    assert Inside is ddplab.DistributedDataParallel
    assert torch.nn.parallel.DistributedDataParallel is not Inside


def test_a_script_run_with_our_class(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("import sys\nfrom torch.nn.parallel.distributed import DistributedDataParallel as DDP\n")
    with script.open("a") as file:
        file.write("print(sys.argv[1:], DDP.__module__, __name__)\n")
    command = [sys.executable, "-m", "ddplab.replace_ddp", script, "--lr", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "['--lr', '1'] ddplab.reference.data_parallel __main__\n"
    monkeypatch.setattr(sys, "argv", ["replace_ddp", "nowhere.py"])
    with pytest.raises(SystemExit, match=r"^expected the path of a Python script, got nowhere\.py"):
        import_module("ddplab.replace_ddp").main()
