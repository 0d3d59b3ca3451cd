"""`ddplab conform`: checks whether a data-parallel class is mathematically local training, and how it overlaps."""

import os
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ..junit import TestCase, write_junit
from ..reference.ranks.fork_server import start_server
from . import shared_options as options
from .shared_options import check_outputs, files_of
from .terminal_output import show_table, write_json

if TYPE_CHECKING:
    from ..conformance.check_outcomes import CheckResult
    from ..conformance.overlap import EmulatedSchedule

SHORT = {
    "ddplab": "ddplab.reference.data_parallel:DistributedDataParallel",
    "torch": "torch.nn.parallel:DistributedDataParallel",
}
"""Short names of classes."""
SCRIPT = Path("out/conform.py")
"""Where a script that shows the first fault is written."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::UserWarning:torch.autograd.graph"}
"""Environment variables of the ranks, unless the user has set them. Programs do on purpose what torch warns about, so
its warnings would only stand between the outcomes."""


HELP = {
    "class": "The class under test: ddplab, torch, or MODULE:CLASS with the constructor of torch's class or a part "
    "of it, or MODULE:FUNCTION that wraps a module.",
    "full": "Try more programs: minutes instead of about one.",
    "device": "Where programs train: cpu, or cuda, where ranks may share a GPU, but not with nccl, and a single rank "
    "is allowed. Only checks that train programs run on a GPU.",
    "against": "Also compare with this class: equal gradients, errors and buckets.",
    "stop": "Stop after the first check that fails unexpectedly.",
    "only": "Run only these checks.",
    "expect": "YAML file with the lists must-pass, expected-fail and skip of checks.",
    "baseline": "Fail if a schedule is slower than in this file of --save-schedule.",
    "save_schedule": "Write the schedules as JSON, for --baseline.",
    "junit": "Write the outcomes as JUnit XML, for CI.",
}
PROCESSES = options.HELP["processes"].format(3)
NVIDIA = "cuda with nccl"


def conform(
    ddp: Annotated[str, Argument(metavar="CLASS", help=HELP["class"])],
    full: Annotated[bool, Option("--full/--quick", help=HELP["full"])] = False,  # noqa: FBT002 - a flag
    world_size: Annotated[int | None, Option(min=1, metavar="N", help=PROCESSES, show_default=False)] = None,
    backend: Annotated[str, Option(metavar="NAME", help="Backend of the process group.")] = "gloo",
    device: Annotated[str | None, Option(metavar="NAME", help=HELP["device"], show_default=NVIDIA)] = None,
    against: Annotated[str | None, Option(metavar="CLASS", help=HELP["against"])] = None,
    stop: Annotated[bool, Option("--exitfirst", "-x", help=HELP["stop"])] = False,  # noqa: FBT002 - a flag
    only: Annotated[str | None, Option(metavar="CHECK,...", help=HELP["only"], show_default="all")] = None,
    expect: Annotated[Path | None, Option(metavar="PATH", help=HELP["expect"])] = None,
    baseline: Annotated[Path | None, Option(metavar="PATH", help=HELP["baseline"])] = None,
    save_schedule: Annotated[Path | None, Option(metavar="PATH", help=HELP["save_schedule"])] = None,
    junit: Annotated[Path | None, Option(metavar="PATH", help=HELP["junit"])] = None,
    json_path: options.Json = None,
) -> None:
    """Check whether a data-parallel class is mathematically local training, is safe, and overlaps.

    Random programs train on real ranks and on one process; both must agree bit for bit where sums are exact. Ranks
    are killed, and fail; results must not depend on any timing. Then the class runs in virtual time on emulated
    devices: how many all-reduces it launches, when, and how much communication is exposed, exactly. What a class does
    not offer is not a failure. The exit status is 1 if a check fails.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    start_server()  # it imports torch while this process does
    from ..conformance.all_checks import BASELINE, CHECKS
    from ..conformance.check_outcomes import read_expectations, write_script
    from ..conformance.check_runner import FULL, QUICK, bench_on, run_check
    from ..conformance.overlap import load, save
    from ..reference.launch import RankPool, world_size_or

    outputs = SCRIPT, save_schedule, junit, json_path
    check_outputs(*outputs, inputs=[expect, baseline, *files_of(ddp), *files_of(against or "")])
    named = list(CHECKS) if only is None else [one.strip() for one in only.split(",")]
    if unknown := sorted(set(named) - set(CHECKS)):
        raise ValueError(f"--only: expected names of checks, got {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if "overlap" not in named and save_schedule is not None:
        raise ValueError("--only: expected the check overlap too, which makes the schedules")
    name, other = SHORT.get(ddp, ddp), SHORT.get(against or "", against)
    ranks = world_size or world_size_or(3)
    _check_possible({name, other or name}, ranks, device)
    expectations = {} if expect is None else read_expectations(expect, list(CHECKS))
    before = () if baseline is None else load(baseline)
    if baseline is not None:
        named += BASELINE
        expectations |= dict.fromkeys(BASELINE, "must-pass")
    pool = RankPool(ranks, backend=backend, device=device or ("cuda" if backend == "nccl" else None))
    with pool, bench_on(pool, name, FULL if full else QUICK, other) as bench:
        bench.baseline = before
        for check, run in (CHECKS | BASELINE).items():
            if check not in named:
                continue
            one = run_check(check, run, bench, expectations.get(check))
            print(f"{one.outcome:13}  {one.check}{': ' if one.message else ''}{one.message}", flush=True)
            if stop and one.problem:
                break
    counts = Counter(one.outcome for one in bench.results)
    problems = [one.problem for one in bench.results if one.problem]
    if not counts["passed"] + counts["failed"]:
        problems = ["no check ran; a run without a check is no proof"]
    rows = [_schedule_row(one) for one in bench.schedules]
    if rows:
        show_table(rows, "schedules in virtual time", optional=("others",))
    if save_schedule is not None and rows:
        save(save_schedule, name, bench.schedules)
    elif save_schedule is not None:
        problems.append("--save-schedule: no schedule, because the class did not run in virtual time")
    document = {
        "subject": name,
        "conforms": not problems,
        "problems": problems,
        "checks": [one.to_json() for one in bench.results],
        **({"schedules": rows} if rows else {}),
    }
    write_json(json_path, document)
    if junit is not None:
        write_junit(junit, f"conformance of {name}", name, [_case(one) for one in bench.results])
    shown = next((one for one in bench.results if one.outcome == "failed" and one.program is not None), None)
    if shown is not None:
        write_script(SCRIPT, name, ranks, shown)
        print(f"written to {SCRIPT}: a program that fails the check {shown.check}, without random choices")
    if not problems:
        failed = f"{counts['failed']} failed as expected, " if counts["failed"] else ""
        print(f"{name} conforms: {counts['passed']} passed, {failed}{counts['not supported']} not supported")
        return
    rest = f", {counts['left out']} checks left out" if counts["left out"] else ""
    if len(problems) == 1:
        raise ValueError(f"{name} does not conform: 1 problem{rest}")
    first = f"the first, and perhaps the cause of the others, is {problems[0]}"
    raise ValueError(f"{name} does not conform: {len(problems)} problems{rest}; {first}")


def _check_possible(subjects: Iterable[str], world_size: int, device: str | None) -> None:
    """Raise ValueError if a class cannot be imported, there are too few ranks, or Hypothesis is not installed."""
    from ..conformance.class_under_test import Subject

    if find_spec("hypothesis") is None:
        raise ValueError("expected the package hypothesis; install it with `pip install 'ddplab[conform]'`")
    if world_size < (1 if device == "cuda" else 2):
        raise ValueError(f"world size: expected at least 2, got {world_size}")
    for subject in subjects:
        Subject(subject).check()


def _case(one: "CheckResult") -> TestCase:
    passed = one.outcome == "passed" and not one.problem
    skipped = "" if passed or one.problem else f"{one.outcome}: {one.message}"
    return TestCase(one.check, one.seconds, one.problem, skipped, "" if one.program is None else repr(one.program))


def _schedule_row(one: "EmulatedSchedule") -> dict[str, str]:
    early = sum(launch.launched_ns < one.last_ready_ns for launch in one.launches)
    return {
        "model": one.model,
        "network": one.network,
        "all-reduces": str(len(one.launches)),
        "launched early": str(early),
        "others": str(one.other_collectives),
        "iteration ms": f"{one.iteration_ns / 1e6:.3f}",
        "exposed ms": f"{one.exposed_ns / 1e6:.3f}",
    }
