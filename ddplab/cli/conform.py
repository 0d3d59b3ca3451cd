"""`ddplab conform`: checks whether a data-parallel class is mathematically local training, and how it overlaps."""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Exit, Option

from ..junit import write_junit
from ..reference.files.writing import write_atomically
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
    "quick": "Leave out the slow checks, and try fewer programs: a third of the time.",
    "budget": "After all checks, go on with further random programs until so much time is over, such as 5min.",
    "device": "Where programs train: cpu, or cuda, where ranks may share a GPU, but not with nccl, and a single rank "
    "is allowed. Only checks that train programs run on a GPU.",
    "against": "Also compare with this class: equal gradients, errors and buckets.",
    "stop": "Stop after the first check that fails unexpectedly.",
    "only": "Run only these checks.",
    "level": "The checks that decide: must (averages are right, no rank crashes or hangs), should (and what torch's "
    "class leaves open), speed (and no time is lost).",
    "tolerance": "Relative error of each addition that averages may have, such as 0.01 for averages in bfloat16.",
    "list": "List the checks and their levels, and exit.",
    "expect": "YAML file with the lists must-pass, expected-fail and skip of checks.",
    "save_expect": "Write the outcomes as a file for --expect.",
    "baseline": "Fail if a schedule is slower than in this file of --save-schedule.",
    "save_schedule": "Write the schedules as JSON, for --baseline.",
}
PROCESSES = options.HELP["processes"].format(3)


def _list(asked: bool) -> None:  # noqa: FBT001 - typer passes it by position
    if asked:
        from ..conformance.all_checks import CHECKS
        from ..conformance.check_outcomes import level_of

        print("\n".join(f"{level_of(check):7} {check}" for check in CHECKS))
        raise Exit


def conform(
    ddp: Annotated[str, Argument(metavar="CLASS", help=HELP["class"])],
    quick: Annotated[bool, Option("--quick", help=HELP["quick"])] = False,  # noqa: FBT002 - a flag
    budget: Annotated[str | None, Option(metavar="TIME", help=HELP["budget"])] = None,
    seed: Annotated[int, Option(min=0, metavar="N", help="Of the random programs.")] = 0,
    world_size: Annotated[int | None, Option(min=1, metavar="N", help=PROCESSES, show_default=False)] = None,
    backend: Annotated[str, Option(metavar="NAME", help="Backend of the process group.")] = "gloo",
    device: Annotated[str | None, Option(metavar="NAME", help=HELP["device"], show_default="cuda with nccl")] = None,
    against: Annotated[str | None, Option(metavar="CLASS", help=HELP["against"])] = None,
    stop: Annotated[bool, Option("--exitfirst", "-x", help=HELP["stop"])] = False,  # noqa: FBT002 - a flag
    only: Annotated[str | None, Option(metavar="CHECK,...", help=HELP["only"], show_default="all")] = None,
    level: Annotated[Literal["must", "should", "speed"], Option(help=HELP["level"])] = "must",
    tolerance: Annotated[float, Option(min=0.0, max=0.5, metavar="X", help=HELP["tolerance"])] = 0.0,
    listed: Annotated[bool, Option("--list", callback=_list, is_eager=True, help=HELP["list"])] = False,  # noqa: FBT002, ARG001 - a flag, which `_list` reads
    expect: Annotated[Path | None, Option(metavar="PATH", help=HELP["expect"])] = None,
    save_expect: Annotated[Path | None, Option(metavar="PATH", help=HELP["save_expect"])] = None,
    baseline: Annotated[Path | None, Option(metavar="PATH", help=HELP["baseline"])] = None,
    save_schedule: Annotated[Path | None, Option(metavar="PATH", help=HELP["save_schedule"])] = None,
    junit: Annotated[Path | None, Option(metavar="PATH", help="Write the outcomes as JUnit XML, for CI.")] = None,
    json_path: options.Json = None,
) -> None:
    """Check whether a data-parallel class is mathematically local training, is safe, and overlaps.

    Random programs train on real ranks and on one process; both must agree bit for bit where sums are exact. Ranks
    are killed, and fail; results must not depend on any timing. Then the class runs in virtual time on emulated
    devices: how many all-reduces it launches, when, and how much communication is exposed, exactly. What a class does
    not offer is not a failure. The exit status is 1 if a check of the level fails, and 2 if the class could not be
    judged.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    interrupts: list[int] = []  # during the imports, without which no file can be written
    usual = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    start_server()  # it imports torch while this process does
    from ..conformance.all_checks import CHECKS, chosen, until
    from ..conformance.check_outcomes import ConformanceReport, UnjudgedError, read_expectations, write_script
    from ..conformance.check_runner import FULL, QUICK, bench_on, check_possible, run_checks
    from ..conformance.class_under_test import Subject
    from ..conformance.timing_and_overlap import load, save
    from ..reference.errors import Error
    from ..reference.launch import RankPool, world_size_or

    start = time.monotonic()
    name, other = SHORT.get(ddp, ddp), SHORT.get(against or "", against)
    report = ConformanceReport(
        subject=name, level=level, seed=seed, tolerance=tolerance, needs_schedules=save_schedule is not None
    )
    signal.signal(signal.SIGINT, usual)
    inputs = [expect, baseline, *options.files_of(ddp), *options.files_of(against or "")]
    try:  # an error that is none of the class is no verdict
        options.check_outputs(SCRIPT, save_expect, save_schedule, junit, json_path, inputs=inputs)
        try:
            if interrupts:
                signal.raise_signal(signal.SIGINT)
            checks = chosen(only, None if baseline is None else load(baseline), quick=quick)
            report.asked = f" in {len(checks)} of {len(CHECKS | checks)} checks" if only or quick else ""
            if "overlap" not in checks and save_schedule is not None:
                option = "--only" if only else "--quick"
                raise ValueError(f"{option}: expected the check overlap too, which makes the schedules")
            seconds = 3600 * options.read_hours("budget", budget) if budget else 0.0
            size, where = world_size or world_size_or(3), device or ("cuda" if backend == "nccl" else None)
            check_possible(size, device, backend)
            expectations = {} if expect is None else read_expectations(expect, list(CHECKS), name)
            asked = (Subject(name, tolerance=tolerance), QUICK if quick else FULL, other, seed)
            ranks: dict[str, Any] = {"world_size": size, "backend": backend, "device": where, "only_data": True}
            import torch._dynamo  # noqa: F401 - optimizers need it; it loads while the ranks start

            with RankPool(**ranks) as pool, bench_on(pool, *asked) as bench:
                report.schedules = bench.schedules
                expected = {"baseline": "must-pass", **expectations}
                for result in run_checks(bench, until(start + seconds, checks, bench), expected, level):
                    report.results.append(result)
                    told = f"{result.check}: {result.message}" if result.message else result.check
                    line = f"{result.outcome:13}  {told}".replace("\n", "\n  ")  # no line of it stands alone
                    print(line, flush=True)
                    if stop and result.problem:
                        break
        except BaseException as error:
            report.ended = f"the run ended early: {str(error) or type(error).__name__}"
            raise
        finally:
            with ExitStack() as last:  # each is written, even if another cannot be
                last.callback(report.tell_github)
                if junit is not None:
                    suite = f"conformance of {name}"
                    last.callback(write_junit, junit, suite, name, report.test_cases(), report.about())
                write_json(json_path, report.to_json())
        if report.schedules:
            show_table([one.row() for one in report.schedules], "schedules in virtual time", optional=("others",))
            if save_schedule is not None:
                save(save_schedule, name, report.schedules)
        if save_expect is not None:
            write_atomically(save_expect, report.to_expectations().encode())
        if failed := [result for result in report.results if result.outcome == "failed"]:
            shown = next((result for result in failed if result.problem), failed[0])
            write_script(SCRIPT, ranks, asked, shown)
            print(f"written to {SCRIPT}: repeats the failure of {shown.check}, without random choices")
    except (Error, ValueError, OSError) as error:
        raise UnjudgedError(str(error)) from error
    if report.problems:
        raise ValueError(str(report)) if report.is_judged else UnjudgedError(str(report))
    print(report)
