"""Autograd: gradients of several threads, what a backward pass can reach, and which tensors accumulate gradients."""

import threading
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ddplab.reference.autograd_hooks import Inbox, accumulators, arrivals_until_pack, attach_hooks
from ddplab.reference.buckets import MOST_WAITING_BYTES, Bucket
from ddplab.reference.features.view_and_sparse_buckets import ViewBucket
from ddplab.reference.parameters import reachable


class Meets:
    """Notices when two threads are told of gradients at the same time: only then do both reach the barrier."""

    def __init__(self, parameters, timeout_s: float) -> None:
        self.parameters = parameters
        self.barrier = threading.Barrier(2, timeout=timeout_s)
        self.met = []
        self.inbox = Inbox()

    def gradients_arrived(self):
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            self.met.append(False)
        else:
            self.met.append(True)


@pytest.mark.parametrize("threads", [True, False])
def test_gradients_from_several_threads_come_one_at_a_time_if_asked(threads):
    """As those of a module on several devices do."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    nodes, listener = accumulators(parameters), Meets(parameters, timeout_s=0.5 if threads else 30)
    detach = attach_hooks(nodes, listener, locked=threads)
    workers = [threading.Thread(target=lambda p=p: (2 * p).sum().backward()) for p in parameters]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert listener.met == [not threads] * 2
    detach()
    (2 * parameters[0]).sum().backward()
    assert len(listener.met) == 2


class Packs:
    """Packs buckets as the reducer does, and counts its calls."""

    def __init__(self, parameters, kind, cuts):
        self.parameters, self.inbox, self.calls = parameters, Inbox(), 0
        ends = [*sorted(cuts), len(parameters)]
        ranges = [range(first, end) for first, end in zip([0, *ends], ends, strict=False) if first < end]
        self.buckets = [kind(indices, [parameters[index] for index in indices]) for indices in ranges]

    def gradients_arrived(self):
        self.calls += 1
        for index in self.inbox.take():
            bucket = self.bucket_of(index)
            if bucket.put([index - bucket.indices[0]]):
                bucket.pack(1.0)
        next_bucket = next((n for n, bucket in enumerate(self.buckets) if not bucket.ready), len(self.buckets))
        self.inbox.limit, self.inbox.room_bytes = arrivals_until_pack(self.buckets, next_bucket)

    def bucket_of(self, index):
        return next(bucket for bucket in self.buckets if index in bucket.indices)


SIZES = st.lists(st.sampled_from([1, 40_000, 50_000, 100_000]), min_size=1, max_size=12)


KINDS = st.sampled_from([Bucket, ViewBucket, partial(Bucket, batched=True)])


@example([40_000] * 6, ViewBucket, {3}, Random(4))  # the first two gradients are too large to wait together
@given(SIZES, KINDS, st.sets(st.integers(1, 11), max_size=2), st.randoms(use_true_random=False))
def test_the_reducer_is_called_in_time_to_pack_and_seldom_before(sizes, kind, cuts, random):
    """No complete bucket waits, nor do more bytes than a bucket lets wait; batched buckets pack once each."""
    parameters = [nn.Parameter(torch.ones(elements)) for elements in sizes]
    listener = Packs(parameters, kind, {cut for cut in cuts if cut < len(sizes)})
    packs_early = kind in (Bucket, ViewBucket)
    nodes = accumulators(parameters)
    attach_hooks(nodes, listener, locked=False)
    arrived = set()
    for index in random.sample(range(len(sizes)), len(sizes)):
        parameters[index].sum().backward()
        arrived.add(index)
        for bucket in listener.buckets:
            first = bucket.indices[0]
            waiting = [i for i in bucket.indices if i in listener.inbox.indices or i - first in bucket.waiting]
            assert not waiting or not arrived.issuperset(bucket.indices)
            assert not packs_early or sum(parameters[i].nbytes for i in waiting) <= MOST_WAITING_BYTES
    if len(listener.buckets) == 1 and (not packs_early or sum(sizes) * 4 <= MOST_WAITING_BYTES):
        assert listener.calls == min(2, len(sizes))  # with the first gradient and with the last


PARAMETERS = 5
terms = st.lists(st.sets(st.integers(0, PARAMETERS - 1)), min_size=1, max_size=3)


@given(terms, st.data())
def test_reachable_parameters_are_those_that_get_a_gradient(terms, data):
    """Each output is a sum of some parameters and of some earlier outputs; some outputs are detached."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(PARAMETERS)]
    nodes = accumulators(parameters)  # kept alive
    indices = {node: index for index, node in enumerate(nodes)}
    outputs = []
    for used in terms:
        earlier = data.draw(st.lists(st.sampled_from(outputs), max_size=2)) if outputs else []
        output = sum([parameters[index] for index in used] + earlier, torch.zeros(1)).sin()
        outputs.append(output.detach() if data.draw(st.booleans()) else output)
    chosen = data.draw(st.lists(st.sampled_from(outputs), unique_by=id, max_size=3))
    for output in chosen:
        if output.requires_grad:
            output.backward(retain_graph=True)
    found = {index for index, parameter in enumerate(parameters) if parameter.grad is not None}
    assert reachable(chosen, indices) == found
