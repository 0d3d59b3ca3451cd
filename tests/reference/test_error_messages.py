"""Messages about mistakes: they name the rank, the parameter and the bucket, and what to do."""

import pytest
import torch
from torch import nn

from ddplab.reference.buckets import Bucket
from ddplab.reference.checks.error_messages import ErrorMessages

from .. import misuse

EXPECTED = {
    "unused_in_forward": [
        "RuntimeError: rank {rank}: Expected to have finished reduction in the prior iteration",
        "did not receive grad for rank {rank}: 4 5\n",
        "Not used in forward: b.weight (parameter 4, shape (4, 4)), b.bias (parameter 5, shape (4,))",
        "Buckets that were not launched: 0",
        "`find_unused_parameters=True`",
        "TORCH_DISTRIBUTED_DEBUG",
    ],
    "unused_in_forward_later": ["Without a gradient: b.weight (parameter 4, shape (4, 4))"],
    "unused_then_no_sync": ["Not used in forward: b.weight (parameter 4"],
    "output_unused_in_loss": [
        "Used in forward, but their output is not used in the loss: b.weight (parameter 2, shape (2, 4)), b.bias"
    ],
    "output_not_found": [
        "Expected to mark a variable ready only once. b.",
        "no output found in forward's return value depends on it, so it was counted as unused",
        "in an object of another type: use lists, tuples, dicts or dataclasses",
    ],
    "used_outside_forward": [
        "RuntimeError: rank {rank}: Expected to mark a variable ready only once. b.",
        "used outside the `forward` function",
    ],
    "two_backward_passes": [
        "RuntimeError: rank {rank}: Expected to mark a variable ready only once. 0.bias (parameter 1, shape (2,)) in "
        "bucket 2",
        "no_sync()",
        "static_graph=True",
    ],
    "two_gradients_for_one_none_for_another": ["rank {rank}: Expected to mark", "a (parameter 0, shape (2,))"],
    "static_graph_uses_more": [
        "rank {rank}: Your training graph has changed in this iteration: b.",
        "not compatible with static_graph",
    ],
    "static_graph_uses_less": ["b.weight (parameter 4, shape (4, 4))", "training graph has changed"],
    "static_graph_hides_its_output": ["b.weight (parameter 4, shape (4, 4))", "Buckets that were not launched: 0"],
    "different_shapes": [
        "RuntimeError: parameter 0 differs between ranks (name, shape, strides, dtype, trained): rank 0 has "
        "('weight', (1, 2)"
    ],
    "different_counts": ["RuntimeError: rank 0 has 2 parameters, rank 1 has 1"],
    "different_buffers": ["RuntimeError: buffer 0 differs between ranks"],
    "frozen_after_wrapping": [
        "RuntimeError: rank {rank}: Expected to have finished reduction in the prior iteration",
        "0.weight (parameter 0, shape (2, 2), frozen since the module was wrapped), 0.bias",
    ],
    "different_layers_frozen": ["RuntimeError: parameter 0 differs between ranks"],
    "different_searches": [
        "RuntimeError: rank 0 was given {{'find_unused_parameters': True}}, rank 1 "
        "{{'find_unused_parameters': False}}: pass the same on all ranks"
    ],
    "different_buffer_syncs": [
        "rank 0 was given {{'forward_sync_buffers': True}}, rank 1 {{'forward_sync_buffers': False}}: pass the same"
    ],
    "different_buffer_broadcasts": [
        "rank 0 was given {{'broadcast_buffers': True, 'forward_sync_buffers': True}}, rank 1 {{'broadcast_buffe"
    ],
    "different_skips": ["rank 0 was given {{'skip_all_reduce_unused_params': True}}, rank 1 {{'skip_all_reduce_unus"],
    "different_reductions": [
        "{{'mixed_precision (reduce, buffer)': (torch.float16, None)}}, rank 1 {{'mixed_precision (reduce, buf"
    ],
    "different_triggers": [
        "rank 0 was given {{'param_to_hook_all_reduce': ['0.weight']}}, rank 1 {{'param_to_hook_a"
    ],
    "different_delays": ["rank 0 was given {{'delay_all_reduce_named_params': ['0.bias']}}, rank 1"],
    "different_caps": ["RuntimeError: rank 0 and rank 1 were given different plans or bucket caps"],
    "nothing_to_train_on_one_rank": ["RuntimeError: DistributedDataParallel is not needed", "ReLU has no trainable"],
    "nothing_to_train": ["RuntimeError: DistributedDataParallel is not needed", "ReLU has no trainable"],
    "error_that_cannot_be_pickled_on_one_rank": ["RuntimeError: UnpicklableError: no names today"],
    "lazy_parameters": ["RuntimeError: Modules with uninitialized parameters", "Sequential has 1.weight"],
    "made_in_inference_mode": ["TypeError: expected a leaf of autograd's graph", "got weight of Linear"],
    "sync_batch_norm_on_cpu": ["ValueError: SyncBatchNorm layers only work with GPU modules"],
    "unknown_name_in_plan": ["ValueError: plan: no trainable parameter is called 'bia'"],
    "unknown_name_in_plan_of_a_group_of_one": ["ValueError: plan: no trainable parameter is called 'bia'"],
    "parameter_twice_in_plan": ["ValueError: buckets: parameters [1] are in more than one bucket"],
    "sparse_in_a_shared_bucket": ["ValueError: plan: bucket 0 holds 0.weight, whose gradients are sparse"],
    "converted_after_wrapping": [
        "RuntimeError: rank {rank}: weight (parameter 0, shape (1, 2)) in bucket 0 was wrapped as a torch.float32 "
        "tensor on cpu, now it is a torch.float64 tensor on cpu. Convert the module before it is wrapped"
    ],
    "converted_and_back": ["bias (parameter 1, shape (1,)) in bucket 0 was converted and converted back, or swapped"],
    "swapped": ["weight (parameter 0, shape (1, 2)) in bucket 0 was converted and converted back, or swapped"],
    "replaced_by_loading": [
        "RuntimeError: rank {rank}: 0.weight, 0.bias, 1.weight, 1.bias: other parameters than those that were",
        "a conversion, a parametrization or load_state_dict(assign=True) has replaced them",
    ],
    "replaced_inside_the_wrapper": ["RuntimeError: rank {rank}: weight, bias: other parameters than those"],
    "replaced_in_one_layer": ["RuntimeError: rank {rank}: 1.weight: other parameters than those"],
    "dense_where_sparse": ["expected the gradient of weight (parameter 0, shape (4, 2))", "sparse torch.float32"],
    "mixed_precision_is_no_configuration": [
        "TypeError: mixed_precision: expected torch.nn.parallel.distributed._MixedPrecision(param_dtype=...",
        "got torch.bfloat16, which has no param_dtype",
    ],
    "mixed_precision_in_integers": [
        "ValueError: mixed_precision: expected param_dtype to be a floating-point dtype or None, got torch.int8"
    ],
    "comm_hook_beside_mixed_precision": [
        "RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once"
    ],
    "delayed_without_trigger": [
        "ValueError: delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: got "
        "only delay_all_reduce_named_params"
    ],
    "delayed_of_another_module": [
        "ValueError: delay_all_reduce_named_params: expected pairs from module.named_parameters(), got 'weight' with",
        "the module has another parameter of that name",
    ],
    "delayed_on_one_rank": ["RuntimeError: rank 0 was given {{'delay_all_reduce_named_params': []"],
    "delayed_sparse_gradients": [
        "ValueError: delay_all_reduce_named_params: weight has sparse gradients; leave it out"
    ],
    "frozen_trigger": ["ValueError: param_to_hook_all_reduce: expected a parameter that requires a gradient"],
    "exception_after_a_delayed_all_reduce": [
        "RuntimeError: rank {rank}: an exception ended the last backward pass after its delayed all-reduce"
    ],
    "distributed_autograd": ["RuntimeError: rank {rank}: expected gradients in .grad, got a context of torch.distr"],
    "distributed_autograd_after_forward": ["expected gradients in .grad, got a context of torch.distr"],
    "compiled_autograd": ["RuntimeError: rank {rank}: compiled autograd cannot run a data-parallel backward pass"],
    "group_without_this_rank": ["RuntimeError: process_group: expected a group with this rank"],
    "second_backward_after_a_delayed_all_reduce": [
        "RuntimeError: rank {rank}: a second backward pass after one forward pass reached the parameter whose"
    ],
    "trigger_before_the_delayed": ["RuntimeError: rank {rank}: param_to_hook_all_reduce: gradients of delayed"],
    "trigger_before_the_delayed_in_a_later_iteration": ["param_to_hook_all_reduce: gradients of delayed parameters"],
    "join_with_delayed_all_reduces": [
        "NotImplementedError: delay_all_reduce_named_params is not supported under Join"
    ],
    "two_device_ids": ["ValueError: device_ids can only be None or contain a single element"],
    "device_id_for_a_cpu_module": ["ValueError: ", "only work with a module on a single GPU"],
    "group_and_mesh": ["RuntimeError: Cannot specify both process_group and device_mesh"],
    "mesh_of_two_dimensions": ["RuntimeError: Only 1D device mesh is supported"],
    "two_comm_hooks": ["RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once"],
    "comm_hook_in_backward": ["RuntimeError: register_comm_hook: expected a call between two iterations"],
    "comm_hook_without_bucket": ["ValueError: Communication hook: expected a parameter called bucket"],
    "comm_hook_is_no_function": ["TypeError: Communication hook must be callable"],
    "comm_hook_returns_too_little": [
        "TypeError: rank {rank}, bucket 0: comm hook comm_hook_returns_too_little.<locals>.hook (",
        "misuse.py:",
        "expected its future to hold a tensor of 3 elements, got one of 1",
    ],
    "comm_hook_returns_nothing": [
        "RuntimeError: rank {rank}, bucket 0: comm hook comm_hook_returns_nothing.<locals>.hook (",
        "expected it to return a torch.futures.Future, got NoneType",
    ],
    "comm_hook_never_ends": [
        "RuntimeError: rank {rank}, bucket 0: comm hook <lambda>.<locals>.<lambda> (",
        "its future had no result after 1 s",
    ],
    "comm_hook_fails_in_a_callback": [
        "RuntimeError: rank {rank}, bucket 0: comm hook comm_hook_fails_in_a_callback.<locals>.hook (",
        "its future holds ",
        "IndexError: list index out of range",
    ],
    "comm_hook_fails_inside_compress": ["comm hook comm_hook_fails_inside_compress.<locals>.mine (", "misuse.py:"],
    "join_with_skipped_buckets": ["NotImplementedError: skip_all_reduce_unused_params is not supported under Join"],
    "comm_hook_is_an_object": ["comm hook Refuses.__call__ (", "misuse.py:", "raised OverflowError: too steep"],
    "pickled_with_a_group": ["RuntimeError: DDP Pickling/Unpickling are only supported"],
    "backward_inside_no_sync": [
        "UserWarning: rank {rank}: forward ran outside of no_sync(), but its backward inside. forward decides, so "
        "these gradients are averaged"
    ],
    "forward_inside_no_sync": [
        "UserWarning: rank {rank}: backward ran outside of no_sync(), but its forward inside",
        "not averaged",
    ],
    "converted_to_channels_last_after_wrapping": [
        "UserWarning: rank {rank}: the gradient of weight (parameter 0, shape (4, 3, 3, 3)) has strides"
    ],
    "graph_of_gradients": ["UserWarning: rank {rank}: backward was called with create_graph=True"],
    "deprecated_arguments": [
        "FutureWarning: `broadcast_buffers` is deprecated",
        "FutureWarning: The `check_reduction` argument",
    ],
    "cap_of_another_type_on_one_rank": ["TypeError: "],
    "device_id_on_one_rank": ["ValueError: DistributedDataParallel device_ids and output_device"],
    "large_parameter_converted": [
        "UserWarning: rank {rank}: the gradient of weight (parameter 0, shape (200, 200)) has strides (1, 200)"
    ],
}


@pytest.mark.parametrize("mistake", EXPECTED)
def test_a_mistake_is_named_on_every_rank(two_ranks, mistake):
    for rank, said in enumerate(two_ranks.run(misuse.message, mistake)):
        for words in EXPECTED[mistake]:
            assert words.format(rank=rank) in said


def test_every_mistake_is_looked_at():
    assert set(misuse.MISUSES) - set(EXPECTED) == {"rank_that_leaves_the_order", "comm_hook_raises_on_one_rank"}


def test_one_warning_about_strides_ends_no_check_of_dtypes():
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))]
    bucket = Bucket([0, 1], parameters)
    messages = ErrorMessages({"first": parameters[0], "second": parameters[1]}, rank=0)
    parameters[0].grad = torch.zeros(3, 2).t()
    bucket.put([0])
    assert bucket.misfits(thorough=True) == [0]
    with pytest.warns(UserWarning, match="Grad strides do not match bucket view strides"):
        assert messages.misfit(bucket, 0, 0) is None
    parameters[1] = bucket.parameters[1] = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    parameters[1].grad = torch.zeros(2, 3, dtype=torch.float64)
    bucket.put([1])
    assert bucket.misfits(thorough=False) == [1]
    assert "expected the gradient of second (parameter 1" in messages.misfit(bucket, 0, 1)
