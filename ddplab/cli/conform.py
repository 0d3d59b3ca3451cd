"""`ddplab conform`: checks whether a data-parallel class is mathematically local training, and how it overlaps."""

import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reference.fork_server import start_server

from .shared_options import HELP, Json, check_outputs, files_of
from .terminal_output import show_table, write_json

if TYPE_CHECKING:
    from ..conformance.overlap import EmulatedSchedule

SHORT = {
    "ddplab": "reference.data_parallel:DistributedDataParallel",
    "torch": "torch.nn.parallel:DistributedDataParallel",
}
"""Short names of classes."""
SCRIPT = Path("out/conform.py")
"""Where a script that shows the first fault is written."""
TESTS = "ddplab/test_conformance.py"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::UserWarning:torch.autograd.graph"}
"""Environment variables of the ranks, unless the user has set them. Programs do on purpose what torch warns about, so
its warnings would only stand between the outcomes."""


def conform(
    ddp: Annotated[
        str,
        typer.Argument(
            metavar="CLASS",
            help="The class under test: ddplab, torch, or MODULE:CLASS with the constructor of torch's class or a "
            "part of it, or MODULE:FUNCTION that wraps a module.",
        ),
    ],
    full: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--full/--quick", help="Try more programs: minutes instead of about one.")
    ] = False,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=HELP["processes"].format(3), show_default=False)
    ] = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Backend of the process group.")] = "gloo",
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where programs train: cpu, or cuda, where ranks may share a GPU, but not with nccl, and a single "
            "rank is allowed. Only checks that train programs run on a GPU.",
            show_default="cuda with nccl",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="CLASS", help="Also compare with this class: equal gradients, errors and buckets."),
    ] = None,
    stop: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--exitfirst", "-x", help="Stop after the first check that fails unexpectedly.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="CHECK,...", help="Run only these checks.", show_default="all")
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="YAML file with the lists must-pass, expected-fail and skip of checks."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|REVISION",
            help="Fail if a schedule is slower than in this file of --save-schedule, or than that of the class at "
            "this git revision of the working directory.",
        ),
    ] = None,
    save_schedule: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the schedules as JSON, for --baseline.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the outcomes as JUnit XML, for CI.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Check whether a data-parallel class is mathematically local training, is safe, and overlaps.

    Random programs train on real ranks and on one process; both must agree bit for bit where sums are exact. Ranks
    are killed, and fail; results must not depend on any timing. Then the class runs in virtual time on emulated
    devices: how many all-reduces it launches, when, and how much communication is exposed, exactly. What a class does
    not offer is not a failure. The exit status is 1 if a check fails.
    """
    if find_spec("pytest") is None:
        raise ValueError("conform: expected the package pytest; install it with `pip install 'ddplab[conform]'`")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    start_server()  # it imports torch while this process does
    from reference.launch import world_size_or

    from ..conformance.all_checks import CHECKS
    from ..conformance.check_outcomes import write_script
    from ..conformance.overlap import save
    from .conform_with_pytest import run_tests

    check_outputs(
        *(SCRIPT, save_schedule, junit, json_path),
        inputs=[
            expect,
            *files_of(ddp),
            *files_of(against or ""),
            *([Path(baseline)] if baseline is not None else []),
        ],
    )
    name, other = SHORT.get(ddp, ddp), SHORT.get(against or "", against)
    chosen = list(CHECKS) if only is None else [one.strip() for one in only.split(",")]
    if unknown := sorted(set(chosen) - set(CHECKS)):
        raise ValueError(f"--only: expected names of checks, got {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if "overlap" not in chosen and (baseline is not None or save_schedule is not None):
        raise ValueError("--only: expected the check overlap too, which makes the schedules of this run")
    world_size = world_size or world_size_or(3)
    options = {
        "class": name,
        "against": other,
        "expect": expect,
        "world-size": world_size,
        "backend": backend,
        "device": device,
    }
    arguments = [
        *(f"--ddplab-{option}={value}" for option, value in options.items() if value is not None),
        *(["--ddplab-full"] if full else []),
        *(["--exitfirst"] if stop else []),
        *(f"--deselect={TESTS}::test_conformance[{check}]" for check in CHECKS if check not in chosen),
        f"--deselect={TESTS}::test_baseline" if baseline is None else f"--ddplab-baseline={baseline}",
    ]
    bench = run_tests(name, arguments, junit)
    results = [] if bench is None else bench.results
    counts = Counter(one.outcome for one in results)
    problems = [one.problem for one in results if one.problem]
    if not counts["passed"] + counts["failed"]:
        problems = ["no check ran; a run without a check is no proof"]
    schedules, slower = ([], []) if bench is None else (bench.schedules, bench.slower)
    rows = [_schedule_row(one) for one in schedules]
    if schedules:
        show_table(rows, "schedules in virtual time", optional=("others",))
    if save_schedule is not None and schedules:
        save(save_schedule, name, schedules)
    elif save_schedule is not None and not slower:
        slower = [f"{name}: no schedule, because the class did not run in virtual time"]
    document = {
        "subject": name,
        "conforms": not problems,
        "problems": problems,
        "checks": [one.to_json() for one in results],
        **({"schedules": rows} if schedules else {}),
        "slower": slower,
    }
    write_json(json_path, document)
    shown = next((one for one in results if one.outcome == "failed" and one.program is not None), None)
    if shown is not None:
        write_script(SCRIPT, name, world_size, shown)
        print(f"written to {SCRIPT}: a program that fails the check {shown.check}, without random choices")
    problems += slower
    if not problems:
        failed = f"{counts['failed']} failed as expected, " if counts["failed"] else ""
        print(f"{name} conforms: {counts['passed']} passed, {failed}{counts['not supported']} not supported")
        return
    for problem in slower:
        print(f"slower: {problem}")
    rest = f", {counts['left out']} checks left out" if counts["left out"] else ""
    if len(problems) == 1:
        raise ValueError(f"{name} does not conform: 1 problem{rest}")
    first = f"the first, and perhaps the cause of the others, is {problems[0]}"
    raise ValueError(f"{name} does not conform: {len(problems)} problems{rest}; {first}")


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
