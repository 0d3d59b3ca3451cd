"""Comparison of two classes on random programs: gradients, missing gradients, errors and buckets."""

from .check_runner import Bench
from .class_under_test import NotSupportedError
from .local_training import FindingError, WeakProgramError, differences, run_locally
from .training_programs import Program, Seen, run_until_error


def check(bench: Bench) -> None:
    """Another class sees the same on random programs, errors and missing gradients included.

    Raises:
        FindingError: They differ on a program.
    """
    if (other := bench.against) is None:
        raise NotSupportedError("--against names no other class")
    from hypothesis import assume, given

    from .random_programs import programs

    def run(program: Program) -> None:
        try:
            run_locally(program, bench.world_size)
        except WeakProgramError:
            assume(condition=False)
        mine = bench.run(run_until_error, bench.subject, program)
        theirs = bench.run(run_until_error, other, program)
        for rank, (got, expected) in enumerate(zip(mine, theirs, strict=True)):
            if problem := difference(got, expected):
                raise FindingError(f"rank {rank}, unlike {other.name}: {problem}", program)

    settings = bench.settings(max_examples=2 * bench.effort.examples)
    settings(given(programs(bench.world_size))(run))()


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
