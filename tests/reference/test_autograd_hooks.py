"""Autograd: gradients of several threads, what a backward pass can reach, and which tensors accumulate gradients."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddplab.reference.autograd_hooks import Inbox, accumulators, attach_hooks
from ddplab.reference.parameters import reachable


class Meets:
    """Notices when two threads are told of gradients at the same time: only then do both reach the barrier."""

    def __init__(self, timeout_s: float) -> None:
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
    nodes, listener = accumulators(parameters), Meets(timeout_s=0.5 if threads else 30)
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


def test_a_tensor_that_is_no_leaf_is_named():
    first = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"parameter 1 \(Tensor, shape \(2,\)\), got the node MulBackward0"):
        accumulators([first, first * 2])
