"""`ddplab conform`: checks whether a data-parallel class is mathematically local training, and how it overlaps."""

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..junit import write_junit
from ..reference.ranks.fork_server import start_server
from . import shared_options as options
from .terminal_output import show_table, write_json

SHORT = {
    "ddplab": "ddplab.reference.data_parallel:DistributedDataParallel",
    "torch": "torch.nn.parallel:DistributedDataParallel",
}
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
    junit: Annotated[Path | None, Option(metavar="PATH", help="Write the outcomes as JUnit XML, for CI.")] = None,
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
    from ..conformance.all_checks import CHECKS, chosen
    from ..conformance.check_outcomes import ConformanceReport, read_expectations, write_script
    from ..conformance.check_runner import FULL, QUICK, bench_on, check_possible, run_checks
    from ..conformance.timing_and_overlap import load, save
    from ..reference.launch import RankPool, world_size_or

    inputs = [expect, baseline, *options.files_of(ddp), *options.files_of(against or "")]
    options.check_outputs(SCRIPT, save_schedule, junit, json_path, inputs=inputs)
    checks = chosen(only, None if baseline is None else load(baseline))
    if "overlap" not in checks and save_schedule is not None:
        raise ValueError("--only: expected the check overlap too, which makes the schedules")
    name, other = SHORT.get(ddp, ddp), SHORT.get(against or "", against)
    ranks = world_size or world_size_or(3)
    check_possible(ranks, device)
    expectations = {} if expect is None else read_expectations(expect, list(CHECKS))
    where = device or ("cuda" if backend == "nccl" else None)
    pool = RankPool(ranks, backend=backend, device=where, only_data=True)
    report = ConformanceReport(subject=name, needs_schedules=save_schedule is not None)
    try:
        with pool, bench_on(pool, name, FULL if full else QUICK, other) as bench:
            report.schedules = bench.schedules
            for result in run_checks(bench, checks, {"baseline": "must-pass", **expectations}):
                report.results.append(result)
                told = f"{result.check}: {result.message}" if result.message else result.check
                print(f"{result.outcome:13}  {told}".replace("\n", "\n  "), flush=True)  # no line of it stands alone
                if stop and result.problem:
                    break
    except BaseException as error:
        report.ended = f"the run ended early: {str(error) or type(error).__name__}"
        raise
    finally:
        write_json(json_path, report.to_json())
        if junit is not None:
            write_junit(junit, f"conformance of {name}", name, report.test_cases())
    if report.schedules:
        rows = [schedule.row() for schedule in report.schedules]
        show_table(rows, "schedules in virtual time", optional=("others",))
        if save_schedule is not None:
            save(save_schedule, name, report.schedules)
    failed = (result for result in report.results if result.outcome == "failed" and result.program is not None)
    shown = next(failed, None)
    if shown is not None:
        write_script(SCRIPT, name, ranks, shown)
        print(f"written to {SCRIPT}: a program that fails the check {shown.check}, without random choices")
    if report.problems:
        raise ValueError(str(report))
    print(report)
