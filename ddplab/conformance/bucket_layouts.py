"""Bucket layouts: the two rules by which reducers fill buckets, and comparison of two classes on random programs."""

from collections.abc import Sequence
from typing import Any

from . import rank_bodies
from .check_runner import Bench, FaultyProgramError
from .class_under_test import NotSupportedError, Subject
from .local_training import FindingError, WeakProgramError, describe_difference, run_locally, same
from .training_programs import Program, Seen

Layout = tuple[tuple[int, ...], ...]
BYTES = 4
MIB = 2**20
SIZES = ((3, 5, 2, 9, 1, 4), (8, 8, 8, 8, 8), (1, 40, 1, 1, 40, 1, 1), (7,))
"""Elements of each parameter of the models whose layouts are checked."""
CAPS = (16, 33, 64, 1 << 20)
"""Bucket caps in bytes."""


def closed_when_reached(order: Sequence[int], sizes: Sequence[int], *caps: int) -> Layout:
    """Return the buckets of torch's rule: a bucket is closed when its bytes reach its cap; the last cap holds on."""
    buckets: list[tuple[int, ...]] = []
    open_bucket: list[int] = []
    for index in order:
        open_bucket.append(index)
        if BYTES * sum(sizes[one] for one in open_bucket) >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(tuple(open_bucket))
            open_bucket = []
    return (*buckets, tuple(open_bucket)) if open_bucket else tuple(buckets)


def at_most(order: Sequence[int], sizes: Sequence[int], *caps: int) -> Layout:
    """Return the buckets of the other rule: a bucket never exceeds its cap, unless a single parameter does."""
    buckets: list[tuple[int, ...]] = []
    open_bucket: list[int] = []
    for index in order:
        cap = caps[min(len(buckets), len(caps) - 1)]
        if open_bucket and BYTES * (sum(sizes[one] for one in open_bucket) + sizes[index]) > cap:
            buckets.append(tuple(open_bucket))
            open_bucket = []
        open_bucket.append(index)
    return (*buckets, tuple(open_bucket)) if open_bucket else tuple(buckets)


RULES = {"closed when the cap is reached": closed_when_reached, "at most the cap": at_most}


def check(bench: Bench) -> None:
    """Check the layouts of several models and caps, which all have to follow one rule, on every rank alike.

    Raises:
        NotSupportedError: The class does not report its buckets, or takes no cap.
        FindingError: A layout follows neither rule, or not that of the others; or ranks differ.
    """
    bench.needs("bucket_cap_mb")
    _check_layouts(bench, [((cap,), {"bucket_cap_mb": (cap + 0.5) / MIB}) for cap in CAPS])


def check_list(bench: Bench) -> None:
    """Check the layouts of lists of caps; see `check`."""
    lists = ((8, 40, 16), (100, 4), (4, 4, 1 << 20))
    _check_layouts(bench, [(caps, {"bucket_cap_mb_list": [(cap + 0.5) / MIB for cap in caps]}) for caps in lists])


def _check_layouts(bench: Bench, cases: Sequence[tuple[tuple[int, ...], dict[str, Any]]]) -> None:
    possible = set(RULES)
    for sizes in SIZES:
        for caps, options in cases:
            by_rank = bench.run(rank_bodies.layout_of, bench.subject, sizes, options, 3)
            got = by_rank[0]
            if got is None:
                raise NotSupportedError("it does not report its buckets")
            words = f"parameters of {[BYTES * size for size in sizes]} bytes, cap {', '.join(map(str, caps))} bytes"
            if any(one != got for one in by_rank):
                raise FindingError(f"{words}: ranks have different buckets: {by_rank}")
            order = range(len(sizes) - 1, -1, -1)
            possible &= {name for name, rule in RULES.items() if rule(order, sizes, *caps) == got}
            if not possible:
                wanted = {name: rule(order, sizes, *caps) for name, rule in RULES.items()}
                raise FindingError(f"{words}: got buckets {got}, expected those of one rule throughout: {wanted}")


def check_against(bench: Bench, other: Subject) -> None:
    """Check that two classes see the same on random programs, errors and missing gradients included.

    Raises:
        FaultyProgramError: They differ on a program.
    """
    from hypothesis import assume, given

    from .random_programs import programs

    def run(program: Program) -> None:
        try:
            run_locally(program, bench.pool.world_size)
        except WeakProgramError:
            assume(condition=False)
        mine = bench.run(rank_bodies.run_script, bench.subject, program)
        theirs = bench.run(rank_bodies.run_script, other, program)
        for rank, (got, expected) in enumerate(zip(mine, theirs, strict=True)):
            if problem := difference(got, expected):
                raise FaultyProgramError(f"rank {rank}, unlike {other.name}: {problem}", program)

    settings = bench.settings(max_examples=2 * bench.effort.examples)
    settings(given(programs(bench.pool.world_size))(run))()


def difference(got: tuple[list[Seen], str], expected: tuple[list[Seen], str]) -> str:
    """Say how two runs of a program on a rank differ; empty if they do not."""
    (mine, error), (theirs, other_error) = got, expected
    if error != other_error:
        return f"ended with {error or 'no error'}, the other with {other_error or 'no error'}"
    for number, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        for kind in ("gradients", "parameters", "buffers"):
            for name, want in getattr(two, kind).items():
                have = getattr(one, kind)[name]
                if not same(have, want):
                    return f"iteration {number}: {kind} {name!r}: {describe_difference(have, want)}"
        # torch orders the last buckets of different dtypes by a hash, so their order is no part of the layout.
        if one.buckets and two.buckets and sorted(one.buckets) != sorted(two.buckets):
            return f"iteration {number}: buckets {one.buckets}, the other's {two.buckets}"
    return ""
