"""Exercises of tutorial 2."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from reference.bucketing import assign_buckets
from reference.launch import RankPool
from reference.minimal import OverlappedDataParallel

from .. import averaging, own_code
from ..exercises import Exercise, matches

HERE = __name__
SIZES = ((3, 1, 4, 1, 5, 9), (5, 5, 5), (1,), (9, 1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 2, 2), (12, 30, 1))


def assign(sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Indices of the parameters in each bucket: a bucket closes as soon as it reaches the cap."""
    buckets: list[list[int]] = []
    filled = cap  # a new bucket begins with the first parameter
    for index, size in enumerate(sizes):
        if filled >= cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def bucket_rule() -> Exercise:
    """Write torch's rule for buckets, of sizes and a cap in the same unit."""

    def judge(rule: Callable[[Sequence[int], int], Any]) -> bool | str:
        for sizes in SIZES:
            given = rule(sizes, 5)
            if not matches(given, assign_buckets(sizes, [5])):
                return f"not the buckets of torch's rule for sizes {sizes} and a cap of 5: {given}"
        return True

    def at_most_the_cap(sizes: Sequence[int], cap: int) -> list[list[int]]:
        buckets: list[list[int]] = []
        for index, size in enumerate(sizes):
            if buckets and sum(sizes[one] for one in buckets[-1]) + size <= cap:
                buckets[-1].append(index)
            else:
                buckets.append([index])
        return buckets

    return Exercise(
        judge=judge,
        hints=(
            "call your function with (3, 1, 4, 1, 5, 9) and 5, then do it on paper. When is the cap reached?",
            "look at the cap after adding a parameter, not before: a bucket may become larger than the cap",
            "keep a list of buckets and the size of the last one; begin a new bucket if the last has reached the cap",
        ),
        explanation="a bucket closes when it reaches the cap, and may be larger than the cap",
        solution=lambda: assign,
        code=assign,
        wrong=lambda: [at_most_the_cap, lambda sizes, _cap: [list(range(len(sizes)))], 3],
    )


class WithNoSync(OverlappedDataParallel):
    """The class of step 5, with `no_sync`."""

    sends = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forward passes in this context only add to the gradients."""
        before, self.sends = self.sends, False
        try:
            yield
        finally:
            self.sends = before

    def gradient_ready(self, parameter: Tensor) -> None:
        """Ignore the gradient under `no_sync`."""
        if self.sends:
            super().gradient_ready(parameter)


class WithoutFinally(WithNoSync):
    """A faulty `no_sync`: after an exception under it, gradients are never averaged again."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Not restored after an exception."""
        before, self.sends = self.sends, False
        yield
        self.sends = before


def no_sync(pool: RankPool) -> Exercise:
    """Write a class with `no_sync`, and answer with its name."""

    def accumulates(name: str) -> bool | str:
        for result in own_code.check(pool, name, ["accumulation", "nested no_sync"]):
            if result.outcome != "passed":
                return f"{result.check}: {result.outcome}: {result.message}"
        averaged = pool.run(averaging.averages_after_failure, name)
        return all(averaged) or "after an exception under no_sync, gradients are not averaged any more"

    return Exercise(
        judge=accumulates,
        hints=(
            "answer with the name of an importable class",
            "keep a flag: while it is off, `gradient_ready` does nothing, and autograd adds up the gradients",
            "`no_sync` is a generator under `contextlib.contextmanager`: remember the flag, switch it off, `yield` "
            "inside `try`, and restore the remembered flag in `finally`",
        ),
        explanation="passes under no_sync, then one with averaging, equal one large batch",
        solution=lambda: f"{HERE}:WithNoSync",
        code=WithNoSync,
        wrong=lambda: ["reference.minimal:OverlappedDataParallel", f"{HERE}:WithoutFinally", "nowhere:Nothing", 1],
    )
