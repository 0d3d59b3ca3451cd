"""Hooks on autograd nodes: gradients of several threads."""

import threading

import pytest
import torch

from ddplab.reference.autograd_graph import accumulators
from ddplab.reference.autograd_hooks import Inbox, attach_hooks


class Meets:
    """Notices when two threads are told of gradients at the same time: only then do both reach the barrier."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.met = []
        self.inbox = Inbox()

    def gradients_arrived(self, gradient):
        try:
            self.barrier.wait(timeout=0.5)
        except threading.BrokenBarrierError:
            self.met.append(False)
        else:
            self.met.append(True)


@pytest.mark.parametrize("threads", [True, False])
def test_gradients_from_several_threads_come_one_at_a_time_if_asked(threads):
    """As those of a module on several devices do."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    nodes, listener = accumulators(parameters), Meets()
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
