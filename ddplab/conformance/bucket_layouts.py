"""Bucket layouts: the two rules by which reducers fill buckets."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..reference.bucketing import MIB
from .check_runner import Bench
from .class_under_test import NotSupportedError
from .local_training import FindingError
from .training_programs import Weight, program_of, run_on_rank

Layout = tuple[tuple[int, ...], ...]
BYTES = 4
SIZES = ((3, 5, 2, 9, 1, 4), (8, 8, 8, 8, 8), (1, 40, 1, 1, 40, 1, 1), (7,))
"""Elements of each parameter of the models whose layouts are checked."""
CAPS = (16, 33, 64, 1 << 20)
"""Bucket caps in bytes."""


def fill(order: Sequence[int], sizes: Sequence[int], *caps: int, exceeds: bool) -> Layout:
    """Return the buckets by one of two rules; each bucket has its cap in bytes, and the last cap holds on.

    `order` has the parameters in launch order, and `sizes` the elements of each. With `exceeds`, torch's rule, a
    bucket is closed when its bytes reach its cap; without, it never exceeds its cap, unless one parameter does.
    """
    buckets: list[list[int]] = [[]]
    for index in order:
        held, cap = BYTES * sum(sizes[placed] for placed in buckets[-1]), caps[min(len(buckets), len(caps)) - 1]
        if buckets[-1] and (held >= cap if exceeds else held + BYTES * sizes[index] > cap):
            buckets.append([])
        buckets[-1].append(index)
    return tuple(map(tuple, buckets))


RULES = {"reaches the cap": partial(fill, exceeds=True), "at most the cap": partial(fill, exceeds=False)}


def layouts(bench: Bench, sizes: Sequence[int], options: dict[str, Any]) -> list[Layout | None]:
    """Return the buckets on each rank after some iterations whose gradients become ready in reverse order."""
    weights = [Weight((size,)) for size in sizes]
    program = program_of(weights, ["train"] * 3, bench.world_size, used=lambda *_: range(len(sizes)), options=options)
    return [seen[-1].buckets for seen in bench.run(run_on_rank, bench.subject, program)]


def check(bench: Bench) -> None:
    """The layouts of several models and caps all follow one rule, on every rank alike."""
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
            if (got := by_rank[0]) is None:
                raise NotSupportedError("it does not report its buckets")
            words = f"parameters of {[BYTES * size for size in sizes]} bytes, cap {', '.join(map(str, caps))} bytes"
            if any(layout != got for layout in by_rank):
                raise FindingError(f"{words}: ranks have different buckets: {by_rank}")
            order = range(len(sizes) - 1, -1, -1)
            possible &= {name for name, rule in RULES.items() if rule(order, sizes, *caps) == got}
            if not possible:
                wanted = {name: rule(order, sizes, *caps) for name, rule in RULES.items()}
                raise FindingError(f"{words}: got buckets {got}, expected those of one rule throughout: {wanted}")
