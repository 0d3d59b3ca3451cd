"""Comparison of two classes on random programs: gradients, missing gradients, errors and buckets."""

from .check_runner import Bench
from .class_under_test import NotSupportedError
from .local_training import FindingError, differences, run_locally
from .training_programs import Program, Seen, run_until_error


def check(bench: Bench) -> None:
    """Another class sees the same on random programs, errors and missing gradients included."""
    if (other := bench.against) is None:
        raise NotSupportedError("--against names no other class")

    def attempt(program: Program) -> None:
        run_locally(program, bench.world_size, device=bench.device)  # raises an error if the program is weak
        mine, theirs = (bench.run(run_until_error, one, program) for one in (bench.subject, other))
        for rank, (got, expected) in enumerate(zip(mine, theirs, strict=True)):
            if problem := difference(got, expected):
                raise FindingError(f"rank {rank}, unlike {other.name}: {problem}", program)

    bench.try_random(attempt, examples=2 * bench.effort)


def difference(got: tuple[list[Seen], str], expected: tuple[list[Seen], str]) -> str:
    """Say how two runs of a program on a rank differ; empty if they do not."""
    (mine, error), (theirs, other_error) = got, expected
    if error != other_error:
        return f"ended with {error or 'no error'}, the other with {other_error or 'no error'}"
    for number, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        for kind, name, how in differences(one, two):
            return f"iteration {number}: {kind}s {name!r}: {how}"
        # torch orders the last buckets of different dtypes by a hash, so their order is no part of the layout.
        if one.buckets and two.buckets and sorted(one.buckets) != sorted(two.buckets):
            return f"iteration {number}: buckets {one.buckets}, the other's {two.buckets}"
    return ""
