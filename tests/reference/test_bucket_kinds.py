"""What our data parallelism does beyond averaging, and where it differs from torch's class on purpose."""

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from reference.autograd_graph import accumulators
from reference.autograd_hooks import Inbox, attach_hooks, tensors_in
from reference.bucket_copies import CACHE_LINE_BYTES
from reference.bucket_kinds import MOST_WAITING_BYTES, ViewBucket
from reference.buckets import Bucket
from reference.checks.error_messages import ErrorMessages, GradientReport
from reference.launch import run_ranks
from reference.output_sink import map_tensors

from . import bodies, scenarios
from .explore import examples

ROOT = Path(__file__).parent.parent
CAPS = [
    {},
    {"bucket_cap_mb": 0.0002},
    {"bucket_cap_mb_list": [0.0001, 0.0003]},
    {"bucket_cap_mb": 0},
    {"bucket_cap_mb": 0, "find_unused_parameters": True},
    {"bucket_cap_mb_list": []},
    {"bucket_cap_mb_list": [0, 0.0003]},
    {"bucket_cap_mb": 0.0002, "find_unused_parameters": True},
    {"bucket_cap_mb_list": [0.0001, 0.0003], "find_unused_parameters": True},
    {"bucket_cap_mb": 0.0002, "static_graph": True},
    {"bucket_cap_mb": 0.0002, "static_graph": True, "find_unused_parameters": True},
    {"bucket_cap_mb": 0.0002, "gradient_as_bucket_view": True},
]


@pytest.mark.parametrize("options", CAPS, ids=str)
def test_buckets_are_torchs_in_every_iteration(two_ranks, options):
    """The layout, and the moment of the rebuild."""
    for ours, torchs in two_ranks.run(bodies.layouts_by_iteration, options):
        assert ours == torchs


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"bucket_cap_mb": 1.5}], ids=str)
def test_logging_data_is_torchs_but_for_the_times(two_ranks, options):
    """Every key of torch's, with its value once torch has sampled it; a few more, and at once."""
    for ours, torchs in two_ranks.run(bodies.logging_data, options):
        assert set(torchs) <= set(ours)
        assert set(ours) - set(torchs) <= {"static_graph", "can_set_static_graph"}
        timed = {key for key in torchs if "time" in key}
        assert {key: ours[key] for key in set(torchs) - timed} == {key: torchs[key] for key in set(torchs) - timed}
        assert all(ours[key] > 0 for key in timed)


def test_views_of_the_buckets_are_the_gradients(two_ranks):
    """After the first iteration, whichever way gradients are zeroed; that is the memory saved.

    A bucket may begin up to a cache line into its memory; here there is one bucket.
    """
    for seen in two_ranks.run(bodies.bytes_of_gradients_and_buckets):
        lead_in_bytes = seen["views"] - seen["parameters"]
        assert 0 <= lead_in_bytes < CACHE_LINE_BYTES
        assert seen["copies"] == 2 * seen["parameters"] + lead_in_bytes
        assert seen["views, zeroed in place"] == seen["views"]


@given(st.lists(st.sampled_from([1, 1_000, 40_000, 100_000]), min_size=1, max_size=20))
def test_gradients_that_views_replace_are_freed_early(sizes):
    """While a bucket fills, no more than `MOST_WAITING_BYTES` of gradients take memory beside their views."""
    parameters = [nn.Parameter(torch.zeros(elements)) for elements in sizes]
    bucket = ViewBucket(range(len(sizes)), parameters)
    for slot, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, slot)
        if bucket.put([slot]):
            bucket.pack(2.0)
        assert sum(parameters[i].nbytes for i in bucket.waiting) <= MOST_WAITING_BYTES
    assert all(parameter.grad is view for parameter, view in zip(parameters, bucket.views, strict=True))
    assert all(view.eq(2 * slot).all() for slot, view in enumerate(bucket.views))


def test_the_state_dict_goes_both_ways(two_ranks):
    assert all(two_ranks.run(bodies.exchange_state_with_torch))


def test_skipped_buckets_are_not_sent(two_ranks):
    """A bucket whose parameters are all unused costs nothing with skip_all_reduce_unused_params."""
    assert two_ranks.run(bodies.buckets_sent_for_unused_parameters) == [(6, 4)] * 2


@pytest.mark.parametrize(
    ("unused", "without_gradient", "fused"),
    [({7}, None, [3]), ({0, 7}, None, [2]), ({0, 1, 2}, None, []), ({7}, 1, []), ({1}, 1, [2])],
)
def test_gradients_are_copied_out_one_by_one_only_if_one_of_the_bucket_is_missing(unused, without_gradient, fused):
    """Unused parameters of other buckets change nothing; those of this bucket are left out."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for index, parameter in enumerate(parameters):
        parameter.grad = None if index == without_gradient else torch.zeros(2)
    bucket = Bucket(range(3), parameters)
    with torch.no_grad(), mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as copy:
        bucket.copy_out(torch.ones(6), unused=frozenset(unused))
    assert [len(call.args[0]) for call in copy.call_args_list] == fused
    for index, parameter in enumerate(parameters):
        if index not in unused:
            assert parameter.grad.tolist() == [1.0, 1.0]
        elif parameter.grad is not None:
            assert parameter.grad.tolist() == [0.0, 0.0]


def test_without_init_sync_nothing_is_communicated(two_ranks):
    """Rank 1 constructs alone; its parameters stay its own."""
    assert two_ranks.run(bodies.construct_on_one_rank_only) == [None, [1.0, 1.0]]


@pytest.mark.parametrize("structure", ["dataclass", "registered node", *scenarios.CUSTOM_OUTPUTS[:4]])
def test_tensors_in_any_structure_may_be_unused_in_the_loss(two_ranks, structure):
    """Dataclasses do not pass torch's sink, registered pytree nodes are not searched by it: it raises for both."""
    expected = two_ranks.run(bodies.train_with_unused_output, "tuple")
    assert all(map(_same, two_ranks.run(bodies.train_with_unused_output, structure), expected))


@pytest.mark.parametrize("structure", scenarios.CUSTOM_OUTPUTS)
def test_outputs_of_any_class_pass_the_sink(two_ranks, structure):
    """Torch's class never launches the all-reduces of a static graph behind a class that pytree does not know."""
    body = bodies.train_with_custom_outputs
    for plain, found, static in two_ranks.run(body, structure):
        bodies.assert_same(found, plain)
        bodies.assert_same(static, plain)


def _same(got, expected):
    bodies.assert_same(got[1:], expected[1:])
    return True


def test_gradients_dropped_after_no_sync_count_as_unused(two_ranks):
    """Torch raises an internal error; here the averages are over what is there, and None stays None."""
    assert two_ranks.run(bodies.drop_accumulated_gradients) == [["6.0", "None"]] * 2


def test_buffers_that_stay_local_may_differ(two_ranks):
    """With broadcast_buffers=False nothing is ever done with them."""
    assert all(two_ranks.run(bodies.local_buffers))


def test_a_rank_without_inputs_may_train_a_static_graph_in_the_next_epoch(two_ranks):
    assert all(two_ranks.run(bodies.static_graph_over_two_epochs))


def test_optimisers_in_backward_are_set_up_once_whatever_forward_comes_first(two_ranks):
    assert two_ranks.run(bodies.forward_before_training) == [1, 1]


def test_bf16_compression_works_with_gloo(two_ranks):
    """Where torch refuses the hook without NCCL."""
    for ours in two_ranks.run(bodies.train_compressed):
        assert ours < 0.02


def test_on_three_ranks_plain_gradients_are_torchs_to_the_bit_and_views_nearly():
    """A third is not exact: torch divides a gradient that is a view already, everything here is multiplied by 1/3."""
    for plain, views in run_ranks(bodies.compare_on_three_ranks, 3, timeout_s=100):
        assert plain == 0
        assert views < 1e-6


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_static_graph_may_run_out_of_inputs(two_ranks, first):
    """Rank 0 has `first` inputs, rank 1 six: the same as without the promise that the graph is static."""
    expected = two_ranks.run(bodies.train_unevenly, {}, first)
    for got, wanted in zip(
        two_ranks.run(bodies.train_unevenly, {"static_graph": True}, first), expected, strict=True
    ):
        bodies.assert_same(got, wanted)


def test_with_create_graph_the_gradient_is_averaged_and_its_derivative_is_local(two_ranks):
    for averaged, local in two_ranks.run(bodies.second_derivatives):
        assert averaged
        assert local


def test_buffers_of_a_forward_pass_do_not_spoil_an_earlier_backward_pass(two_ranks):
    """A broadcast overwrites buffers that the graph of the pass before has saved."""
    assert all(two_ranks.run(bodies.backward_after_the_next_forward))


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


nested = st.recursive(
    st.integers(0, 3).map(lambda value: torch.tensor(float(value))) | st.text(max_size=2) | st.none(),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), parts, max_size=3)
        | st.lists(parts, max_size=3).map(lambda some: scenarios.Labelled(*some, label="a"))
        | st.lists(parts, max_size=3).map(lambda some: scenarios.LabelledTuple(*some, label="a"))
        | st.builds(scenarios.Pair, parts, parts)
        | st.builds(scenarios.Outputs, parts, parts)
    ),
    max_leaves=8,
)


@examples(200)
@given(nested)
def test_mapping_the_tensors_of_an_output_changes_nothing_else(output):
    """Every tensor is changed once, in order; types and all other values stay."""
    before = [tensor.item() for tensor in tensors_in(output)]
    changed = map_tensors(lambda tensor: tensor + 1, output)
    assert [tensor.item() for tensor in tensors_in(changed)] == [value + 1 for value in before]
    assert [tensor.item() for tensor in tensors_in(output)] == before
    bodies.assert_same(map_tensors(lambda tensor: tensor - 1, changed), output)
    assert type(changed) is type(output)
    assert getattr(changed, "label", None) == getattr(output, "label", None)


def test_private_names_that_are_missing(two_ranks):
    """What tools may ask of torch's class and not of ours; every other name is there."""
    for missing in two_ranks.run(bodies.names_missing):
        assert missing == (ROOT / "tests" / "names_missing.txt").read_text().split()


def test_torch_compile_splits_its_graph_where_buckets_end(two_ranks):
    """As under torch's class, so that a compiled module overlaps too."""
    for ours, torchs in two_ranks.run(bodies.compiled_graphs):
        assert ours == torchs > 1


def test_attributes_that_torch_lets_scripts_set(two_ranks):
    """Those that have an effect in torch have it here; the others are fixed at construction, and say so."""
    for seen in two_ranks.run(bodies.attributes_that_torch_lets_scripts_set):
        assert seen["unused"] is None
        assert seen["synchronized"] == [True, False]
        assert len(seen["refused"]) == 4
        assert all("cannot be changed after construction" in message for message in seen["refused"])
        assert seen["moved"] == ([1.0, 1.0], {"scale": 2})


def test_the_wrapper_is_no_instance_of_torchs_class(two_ranks):
    assert not any(seen["is torch's"] for seen in two_ranks.run(bodies.attributes_that_torch_lets_scripts_set))


def test_a_gradient_is_sampled_when_its_bucket_is_full(two_ranks):
    """Torch copies it when it arrives, so that a later hook of the same pass cannot change what is sent."""
    for ours, torchs in two_ranks.run(bodies.gradients_changed_by_a_later_hook):
        assert ours == [3.0]  # the average of 2 * 1 and 2 * 2
        assert torchs == [1.5]


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_sparse_gradient_is_not_scaled_in_memory_that_a_dense_one_shares(two_ranks, options):
    """Torch divides the values in place, and so the dense gradient, which is divided again."""
    for ours, torchs in two_ranks.run(bodies.sparse_gradients_in_shared_memory, options):
        assert ours == [3.0] * 3
        assert torchs == [1.5] * 3


@pytest.mark.parametrize("structure", ["dataclass", "set", "iterator"])
def test_a_static_graph_behind_any_structure_is_averaged(two_ranks, structure):
    """Torch's sink has nothing to pass on, so the gradients stay local."""
    for rank, (ours, torchs) in enumerate(two_ranks.run(bodies.static_graph_behind, structure, False)):
        assert ours == [1.5] * 6
        assert torchs == [1.0 + rank] * 6


def test_a_deep_copy_of_a_trained_static_graph_is_averaged(two_ranks):
    """Torch's copy takes the first iteration for done, so its gradients stay local."""
    for rank, (ours, torchs) in enumerate(two_ranks.run(bodies.static_graph_behind, "tensor", True)):
        assert ours == [1.5] * 6
        assert torchs == [1.5] * 3 + [1.0 + rank] * 3


def test_a_hook_sees_gradients_in_the_memory_format_of_their_parameters(two_ranks):
    """In torch the elements of a channels-last gradient are in another order than its gradient's."""
    assert two_ranks.run(bodies.gradients_that_a_hook_sees) == [[(True, True), (False, False)]] * 2


def test_forward_under_join_waits_for_no_collective_of_its_own(two_ranks):
    assert two_ranks.run(bodies.items_read_under_join) == [0, 0]


def test_one_warning_about_strides_ends_no_check_of_dtypes():
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))]
    bucket = Bucket([0, 1], parameters)
    messages = ErrorMessages({"first": parameters[0], "second": parameters[1]}, rank=0)
    report = GradientReport(messages)
    parameters[0].grad = torch.zeros(3, 2).t()
    assert bucket.misfits([0], strides=True) == [0]
    with pytest.warns(UserWarning, match="Grad strides do not match bucket view strides"):
        assert report(bucket, 0, 0) is None
    parameters[1] = bucket.parameters[1] = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    parameters[1].grad = torch.zeros(2, 3, dtype=torch.float64)
    assert bucket.misfits([0, 1], strides=False) == [1]
    assert "expected the gradient of second (parameter 1" in report(bucket, 0, 1)
