"""`ddplab conform`: checks whether a data-parallel class is mathematically local training, and how it overlaps."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reference.fork_server import start_server

from .shared_options import Json, check_outputs, files_of
from .terminal_output import show_table, write_json

if TYPE_CHECKING:
    from ..conformance.overlap import Schedule

SHORT = {
    "ddplab": "reference.data_parallel:DistributedDataParallel",
    "torch": "torch.nn.parallel:DistributedDataParallel",
}
"""Short names of classes."""
SCRIPT = Path("out/conform.py")


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
    world_size: Annotated[int, typer.Option(min=2, metavar="N", help="Number of ranks.")] = 3,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Backend of the process group.")] = "gloo",
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
    script: Annotated[
        Path, typer.Option(metavar="PATH", help="Where to write a script that shows the first fault.")
    ] = SCRIPT,
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
    start_server()  # it imports torch while this process does
    from ..conformance.all_checks import CHECKS
    from ..conformance.check_runner import FULL, QUICK, Result
    from ..conformance.class_under_test import Subject
    from ..conformance.conformance_report import read_expectations, write_script
    from ..conformance.kit import conform as run
    from ..conformance.overlap import compare, load_baseline, save, schedules_of

    check_outputs(
        *(script, save_schedule, junit, json_path),
        inputs=[
            expect,
            *files_of(ddp),
            *files_of(against or ""),
            *([Path(baseline)] if baseline is not None else []),
        ],
    )
    name, other = SHORT.get(ddp, ddp), None if against is None else SHORT.get(against, against)
    expected = {} if expect is None else read_expectations(expect, list(CHECKS))
    checks = None if only is None else [one.strip() for one in only.split(",")]
    if checks is not None and "overlap" not in checks and (baseline is not None or save_schedule is not None):
        raise ValueError("--only: expected the check overlap too, which makes the schedules of this run")
    before = () if baseline is None else load_baseline(baseline, name)

    def show(result: Result) -> None:
        if result.outcome == "left out":
            return  # shown together
        print(f"{result.outcome:13}  {result.check}{': ' if result.message else ''}{result.message}")

    report = run(
        name,
        FULL if full else QUICK,
        world_size=world_size,
        backend=backend,
        against=other,
        expected=expected,
        stop=stop,
        only=checks,
        on_result=show,
    )
    for reason in dict.fromkeys(one.message for one in report.results if one.outcome == "left out"):
        names = [one.check for one in report.results if one.outcome == "left out" and one.message == reason]
        print(f"{'left out':13}  {', '.join(names)}: {reason}")
    outcomes = {result.check: result.outcome for result in report.results}
    slower: list[str] = []
    document = report.to_json()
    if outcomes.get("overlap") in ("passed", "failed"):
        schedules = list(schedules_of(Subject(name)))
        document["schedules"] = [_schedule_row(one) for one in schedules]
        show_table(document["schedules"], "schedules in virtual time", optional=("others",))
        if save_schedule is not None:
            save(save_schedule, name, schedules)
        slower = compare(schedules, before)
    elif baseline is not None or save_schedule is not None:
        slower = [f"{name}: no schedule, because the class did not run in virtual time"]
    document["slower"] = slower
    write_json(json_path, document)
    if junit is not None:
        report.save_junit(junit)
    problems = [*report.problems, *slower]
    shown = next((one for one in report.results if one.outcome == "failed" and one.program is not None), None)
    if shown is not None:
        write_script(script, name, world_size, shown)
        print(f"written to {script}: a program that fails the check {shown.check}, without random choices")
    if not problems:
        counts = Counter(one.outcome for one in report.results)
        failed = f"{counts['failed']} failed as expected, " if counts["failed"] else ""
        print(f"{name} conforms: {counts['passed']} passed, {failed}{counts['not supported']} not supported")
        return
    for problem in slower:
        print(f"slower: {problem}")
    left_out = sum(one.outcome == "left out" for one in report.results)
    rest = f", {left_out} checks left out" if left_out else ""
    if len(problems) == 1:
        raise ValueError(f"{name} does not conform: 1 problem{rest}")
    first = f"the first, and perhaps the cause of the others, is {problems[0]}"
    raise ValueError(f"{name} does not conform: {len(problems)} problems{rest}; {first}")


def _schedule_row(one: "Schedule") -> dict[str, str]:
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
