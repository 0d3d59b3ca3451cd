"""Rival: what a rank computes while collectives are in flight, and the collectives that are in its way."""

from collections.abc import Collection, Mapping
from functools import partial

import torch
import torch.distributed as dist

from reference import models
from reference.parameters import size_bytes, trainable_parameters

from .copies import pack
from .preparation import first_layout
from .samples import clock_ns, median_ns, time_ns
from .stream import Messages, Stream

PASSES = 2
"""Beside a stream of collectives, which alone would last twice as long as those passes do alone."""
LEAST_COLLECTIVES, MOST_COLLECTIVES = 4, 400
TRIALS = 5
"""Of a pass and of a collective, to tell how far apart collectives are to be."""


class Rival:
    """A model on this rank.

    What it computes is a backward pass, and copies into buckets and out of them. A forward pass, from which gradients
    come, goes before, but rarely meets a collective in training, so its time does not count.

    Args:
        model: As for `--model`.
        beside: Ranks that wait for each other through it wait for none of the collectives.
    """

    def __init__(self, model: str, beside: dist.ProcessGroup) -> None:
        self.beside = beside
        self._module, self._loss_fn = models.build(model)
        parameters = trainable_parameters(self._module)
        self._buckets = first_layout(self._module, parameters).buckets
        self.gradient_bytes = sum(map(size_bytes, parameters.values())) // 4 * 4
        self._messages = Messages(self.gradient_bytes)
        self._ready_ns = [0] * len(parameters)
        self._apart: Collection[int] = ()
        self._apart_bytes = 0
        self._works: list[dist.Work] = []
        for index, parameter in enumerate(parameters.values()):
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index))
        self.compute_alone()  # the first touch of every gradient does not count
        self._whole_ns = time_ns(self.compute_alone)

    def compute_alone(self) -> int:
        """Nanoseconds of a pass, up to the slowest rank's end."""
        dist.barrier()
        return self._compute()

    def contend(self, size: int, running: int) -> tuple[int, int, list[int]]:
        """Nanoseconds of a collective alone, of one beside computation, and of passes beside collectives."""
        about_ns = self._stream(LEAST_COLLECTIVES, size, running)[0]
        of_a_pass = torch.tensor(min(max(LEAST_COLLECTIVES, self._whole_ns // about_ns), MOST_COLLECTIVES))
        dist.all_reduce(of_a_pass, op=dist.ReduceOp.MAX)
        alone_ns = self._stream(int(of_a_pass), size, running)[0]
        return alone_ns, *self._stream(2 * PASSES * int(of_a_pass), size, running, passes=PASSES)

    def places_apart(self, size: int, least_ns: int) -> list[int]:
        """Gradients that come so far apart from each other, by rank 0's clock; unused parameters have none.

        From one to the next there is time for a collective, also where computation slows it, and `least_ns` more.
        """
        alone, ready = [], []
        for _ in range(TRIALS):
            dist.barrier()
            alone.append(time_ns(dist.all_reduce, self._messages.of(size, 1)[0]))
            self.compute_alone()
            ready.append(list(self._ready_ns))
        agreed = torch.tensor([median_ns(alone), *map(median_ns, zip(*ready, strict=True))])
        dist.broadcast(agreed, 0)
        alone_ns, *moments = agreed.tolist()
        return apart({place: ns for place, ns in enumerate(moments) if ns}, least_ns + 2 * alone_ns)

    def interrupt(self, size: int, places: Collection[int]) -> int:
        """Nanoseconds of a pass in which a collective is issued whenever one of these gradients is ready."""
        self._apart, self._apart_bytes = frozenset(places), size
        taken_ns = self.compute_alone()
        self._apart = ()
        for work in self._works:
            work.wait()
        self._works.clear()
        return taken_ns

    def _stream(self, count: int, size: int, running: int, *, passes: int = 0) -> tuple[int, list[int]]:
        dist.barrier()
        stream = Stream(self._messages.of(size, count), at_a_time=1 if running == 1 else None)
        computed_ns = [self._compute() for _ in range(passes)]
        until_ns = clock_ns() if passes else float("inf")
        stream.wait()
        return stream.pace_ns(until_ns), computed_ns

    def _compute(self) -> int:
        """Nanoseconds up to the slowest rank's end, as in training.

        Collectives rarely slow all ranks equally: their threads take more of one core than of another for a while.
        Whoever is done sooner waits in training too, and leaves its core to the others.
        """
        self._module.zero_grad()
        loss = self._loss_fn(self._module)
        start = clock_ns()
        loss.backward()
        for bucket in self._buckets:
            bucket.reset()
            pack(bucket)
            bucket.copy_out()
        dist.barrier(self.beside)
        return clock_ns() - start

    def _ready(self, index: int, _parameter: torch.Tensor) -> None:
        """All ranks' gradients become ready in one order, so all issue the same collectives."""
        self._ready_ns[index] = clock_ns()
        if index in self._apart:
            work = dist.all_reduce(self._messages.of(self._apart_bytes, 1)[0], async_op=True)
            assert work is not None
            self._works.append(work)


def apart(moments: Mapping[int, int], least: int) -> list[int]:
    """The places with the first moment, and with each that comes at least so long after the one chosen before."""
    chosen: list[int] = []
    for place in sorted(moments, key=moments.__getitem__):
        if not chosen or moments[place] >= moments[chosen[-1]] + least:
            chosen.append(place)
    return chosen
