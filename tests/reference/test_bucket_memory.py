"""The memory of buckets: slots that begin a cache line."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.bucket_memory import lead_in
from ddplab.reference.buckets import Bucket


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.sampled_from([1, 4, 8, 16]))
def test_the_lead_in_puts_as_many_elements_as_it_can_into_slots_that_begin_a_cache_line(elements, line):
    def aligned(lead: int) -> int:
        begins = [lead + sum(elements[:slot]) for slot in range(len(elements))]
        return sum(count for begin, count in zip(begins, elements, strict=True) if begin % line == 0)

    lead = lead_in(elements, line)
    assert 0 <= lead < line
    assert aligned(lead) == max(map(aligned, range(line)))


def test_a_classifiers_odd_bias_leaves_its_weight_at_a_cache_line():
    """1000 biases take 62.5 cache lines of 16 floats; half a line before them aligns the matrix after them."""
    linear = torch.nn.Linear(64, 1000)
    bucket = Bucket([1, 0], [linear.bias, linear.weight])
    assert lead_in([1000, 64000], 16) == 8
    assert bucket.views[1].data_ptr() % 64 == 0
    assert len(bucket.buffer) == 65000, "the message is as long as its gradients"
