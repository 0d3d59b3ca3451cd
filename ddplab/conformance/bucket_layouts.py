"""Bucket layouts: the two rules by which reducers fill buckets."""

from collections.abc import Sequence
from typing import Any

from .check_runner import Bench
from .class_under_test import NotSupportedError
from .local_training import FindingError
from .training_programs import Program, ProgramStep, Weight, run_on_rank

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


def layouts(bench: Bench, sizes: Sequence[int], options: dict[str, Any]) -> list[Layout | None]:
    """Return the buckets on each rank after some iterations whose gradients become ready in reverse order."""
    world_size = bench.world_size
    step = ProgramStep("train", (tuple(range(len(sizes))),) * world_size, (1,) * world_size)
    program = Program(tuple(Weight((size,)) for size in sizes), (step,) * 3, options)
    return [seen[-1].buckets for seen in bench.run(run_on_rank, bench.subject, program)]


def check(bench: Bench) -> None:
    """Check the layouts of several models and caps, which all have to follow one rule, on every rank alike.

    Raises:
        NotSupportedError: The class does not report its buckets, or takes no cap.
        FindingError: A layout follows neither rule, or not that of the others; or ranks differ.
    """
    bench.needs("bucket_cap_mb")
    _check_layouts(bench, [((cap,), {"bucket_cap_mb": (cap + 0.5) / MIB}) for cap in CAPS])


def check_list(bench: Bench) -> None:
    """With a list of caps, each bucket has its own, and the last cap holds for all further ones; see `check`."""
    bench.needs("bucket_cap_mb_list")
    lists = ((8, 40, 16), (100, 4), (4, 4, 1 << 20))
    _check_layouts(bench, [(caps, {"bucket_cap_mb_list": [(cap + 0.5) / MIB for cap in caps]}) for caps in lists])


def _check_layouts(bench: Bench, cases: Sequence[tuple[tuple[int, ...], dict[str, Any]]]) -> None:
    possible = set(RULES)
    for sizes in SIZES:
        for caps, options in cases:
            by_rank = layouts(bench, sizes, options)
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
