"""The launcher: results by rank, causes of failures, and time-outs."""

import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from subprocess import run

import pytest
import torch

from ddplab.reference import launch
from ddplab.reference.errors import (
    CollectiveError,
    Error,
    LaunchOrderError,
    RankError,
    RankLostError,
    RanksStillRunningError,
)
from ddplab.reference.launch import RankPool, run_ranks
from ddplab.reference.ranks import pool_members
from ddplab.reference.ranks.fork_server import OUTPUTS, Surroundings, process_context

from . import launch_bodies as bodies


def test_tensors_outlive_the_ranks_that_made_them():
    results = run_ranks(bodies.return_tensor, 2, timeout_s=60)
    assert [tensor.tolist() for tensor in results] == [[0.0] * 3, [1.0] * 3]


DIED_FIRST = r"rank 0 exited without .* \(exit code 17\)\. Rank 1 then failed: RuntimeError"


@pytest.fixture(scope="module")
def mortal_ranks() -> Iterator[RankPool]:
    """Ranks that a test may end: the next test that uses the pool starts new ones."""
    with pytest.MonkeyPatch.context() as patch, RankPool(2, timeout_s=60) as pool:
        patch.setattr(pool_members, "TAIL_TIMEOUT_S", 0.5)
        yield pool


@pytest.mark.parametrize(
    ("body", "rank", "kind", "says"),
    [
        (bodies.fail_on, 1, RankError, r"(?s)rank 1 failed.*fail_on.*ArithmeticError: the sums do not add up"),
        (bodies.die_on, 0, RankLostError, DIED_FIRST),
        (bodies.die_after_reports, 0, RankLostError, DIED_FIRST),
        (
            bodies.hang_on,
            1,
            RanksStillRunningError,
            r"(?s)ranks \[1\] were still running at the time-out.*Ranks \[0\] had returned.*Stack of rank 1.*"
            r"bodies.py.* in hang_on",
        ),
    ],
)
def test_a_rank_that_goes_wrong_ends_the_others_and_tells_why(mortal_ranks, body, rank, kind, says):
    mortal_ranks.run(bodies.identify)  # ranks are up: what follows is about the body alone
    with pytest.raises(RankError, match=says) as caught:
        mortal_ranks.run(body, rank, timeout_s=1)
    assert (type(caught.value), caught.value.rank) == (kind, rank)
    again = mortal_ranks.run(bodies.identify, "again")
    assert again == [(0, 2, 0, 2, "again"), (1, 2, 1, 2, "again")]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(ArithmeticError, RankError), (LaunchOrderError, LaunchOrderError), (bodies.OwnError, CollectiveError)],
)
def test_the_class_of_an_error_reaches_the_launcher_with_rank_and_traceback(mortal_ranks, raised, kind):
    """A class of another module may have another constructor, so the launcher raises its parent."""
    with pytest.raises(
        RankError, match=rf"^rank 1 failed: .*{raised.__name__}(?s:.*Traceback.* in raise_error)"
    ) as caught:
        mortal_ranks.run(bodies.raise_error, 1, raised)
    assert (type(caught.value), caught.value.rank) == (kind, 1)


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("segfault", r"-11\)", r"Fatal Python error: Segmentation fault.*launch_bodies.py.* in crash"),
        (
            "abort",
            r"-6\); Gloo ends a process whose collectives differ",
            r"Fatal Python error: Aborted.*launch_bodies.py.* in crash",
        ),
        ("kill", r"-9\)", ""),
        ("terminate", r"-6\)", r"terminate called without an active exception.*launch_bodies.py.* in crash"),
    ],
)
def test_the_end_of_the_standard_error_of_a_rank_that_crashed_is_in_the_error(mortal_ranks, capfd, how, code, says):
    mortal_ranks.close()  # so that ranks write where this test reads
    last = rf"rank 1 exited .*\(exit code {code}.*The end of its standard error:\nthe last words\n.*{says}"
    with pytest.raises(RankError, match=f"(?s){last}"):
        mortal_ranks.run(bodies.crash, 1, how)
    assert capfd.readouterr().err.startswith("the last words\n")  # as without an error: it reaches the launcher's


def test_all_that_ranks_write_to_their_standard_error_reaches_the_launchers_in_order(capfd):
    lines = 5000
    with RankPool(2, timeout_s=60) as pool:
        pool.run(bodies.write_errors, lines)
    written = capfd.readouterr().err.splitlines()
    for rank in range(2):
        mine = [line for line in written if line.startswith(f"rank {rank} ")]
        assert mine == [f"rank {rank} line {number} {'x' * 80}" for number in range(lines)]


def test_a_child_process_of_a_rank_that_crashed_does_not_delay_the_error(mortal_ranks):
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)\(exit code -6\).*Fatal Python error: Aborted"):
        mortal_ranks.run(bodies.leave_a_child, 0)
    assert time.monotonic() - started < 15  # the child lives for 20 s


def test_a_rank_that_waits_for_one_that_has_returned_is_named_before_the_time_out(mortal_ranks, monkeypatch):
    mortal_ranks.run(bodies.identify)
    monkeypatch.setattr(launch, "REMINDER_S", 0.2)
    with (
        pytest.warns(UserWarning, match=r"^ranks \[1\] are still running 0.2 s after ranks \[0\] .*model.join\(\)"),
        pytest.raises(RankError),
    ):
        mortal_ranks.run(bodies.hang_on, 1, timeout_s=0.5)


def test_a_rank_that_has_not_come_to_its_body_says_so():
    with (
        RankPool(1) as pool,
        pytest.raises(
            RankError, match=r"Stack of rank 0, innermost call first:\n(unknown: the rank was still starting|  File )"
        ),
    ):
        pool.run(bodies.identify, timeout_s=1e-9)


def test_a_rank_that_dies_between_two_bodies_is_an_error_of_the_next_body(mortal_ranks):
    mortal_ranks.run(bodies.die_after_returning, 1)
    for one in mortal_ranks._ranks[1:]:
        one._process.join(timeout=10)
    with pytest.raises(RankError, match=r"rank 1 exited without reporting an error \(exit code -6\)"):
        mortal_ranks.run(bodies.identify)
    assert len(mortal_ranks.run(bodies.identify)) == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (bodies.return_unpicklable, r"(?s)rank \d failed.*[Pp]ickle"),
        (bodies.raise_two_lines, r"failed: ValueError: expected a weight; the other ranks"),
        (bodies.hang, r"(?s)Stack of rank 0.* in hang\n.*Stack of rank 1.* in hang\n"),
    ],
)
def test_a_result_that_cannot_be_sent_and_an_error_of_two_lines_are_failures_and_every_hanging_rank_shows_where(
    mortal_ranks, body, says
):
    mortal_ranks.run(bodies.identify)
    with pytest.raises(RankError, match=says):
        mortal_ranks.run(body, timeout_s=2)


def test_a_world_without_ranks_is_refused():
    with pytest.raises(ValueError, match="world_size: expected at least 1, got 0"):
        RankPool(0)


def test_ranks_without_the_device_that_they_are_given_end_with_one_line():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with (
        RankPool(1, device="cuda", timeout_s=60) as pool,
        pytest.raises(Error, match=r"^ranks: expected a CUDA device, got none; use Gloo and the CPU$"),
    ):
        pool.run(bodies.identify)


@pytest.mark.parametrize("backend", ["no-such", "gloo,gloo-2", "cpu:no-such"])
def test_a_backend_that_torch_lacks_is_refused_in_one_line(backend):
    says = f"^ranks: expected a backend that this torch has, such as gloo, got '{backend}'; name another$"
    with RankPool(1, backend=backend, timeout_s=60) as pool, pytest.raises(Error, match=says):
        pool.run(bodies.identify)


AS_UNDER_TORCHRUN = """
import torch
from ddplab.reference.launch import run_ranks
from ddplab.reference.ranks.rank_process import _states_of_threads
def train(_rank, _world_size):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    return _states_of_threads("pt_gloo_runloop") != set()
print(run_ranks(train, 1), _states_of_threads("pt_gloo_runloop"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_under_torchrun_no_thread_of_gloo_outlives_the_ranks():
    """Fails if torch.distributed.nn.functional is imported while a group exists, whose threads then never end."""
    torchruns = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = os.environ | torchruns | {"TORCHELASTIC_RUN_ID": "test"}
    done = run([sys.executable, "-c", AS_UNDER_TORCHRUN], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout, done.returncode) == ("[True] set()\n", 0), done.stderr


def test_ranks_end_silently_when_their_launcher_is_gone():
    read, written = Pipe(duplex=False)
    surroundings = Surroundings(outputs=dict.fromkeys(OUTPUTS, written))
    launcher = process_context().Process(target=bodies.vanish, args=(surroundings,))
    launcher.start()
    surroundings.close()
    with open(os.dup(read.fileno())) as told:
        assert told.read() == ""  # as long as a rank lives, it holds the pipe
    launcher.join()
    assert launcher.exitcode == 0


def test_ranks_share_the_cores(four_ranks):
    assert four_ranks.run(bodies.count_threads) == [max(1, (os.cpu_count() or 1) // 4)] * 4


def test_tensors_arrive_as_ranks_have_made_them(two_ranks):
    for rank, found in enumerate(two_ranks.run(bodies.some_tensors)):
        for name, want in bodies.some_tensors(rank, 2).items():
            got = found[name]
            assert type(got) is type(want), name
            assert (got.dtype, got.layout, got.requires_grad) == (want.dtype, want.layout, want.requires_grad), name
            assert vars(got) == vars(want), name
            assert got.shape == want.shape, name
            if not want.is_sparse:
                assert got.stride() == want.stride(), name
            assert torch.equal(*(one.to_dense() if one.is_sparse else one for one in (got, want))), name
        found["plain"].add_(1)  # it can be written
