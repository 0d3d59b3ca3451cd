"""Local training, the oracle of the checks, and differences from it."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab.conformance.all_checks import PLAIN, program_of
from ddplab.conformance.local_training import WeakProgramError, compare, describe_difference, run_locally, same
from ddplab.conformance.random_programs import programs
from ddplab.conformance.training_programs import UNUSUAL, Net, Seen, loss_of, optimizer_of, unusual

from ..explore import examples


@given(programs(3, kinds=("train", "accumulate", "evaluate", "change_lr"), keep=True, any_use=True))
def test_a_program_without_something_unusual_has_it_no_more(program):
    assert [name for name, without in UNUSUAL.items() if name in unusual(without(program))] == []


@examples(15)
@given(programs(3))
def test_local_training_of_a_program_is_what_one_process_computes(program):
    """Without `no_sync` and with cleared gradients, the average is the gradient of the ranks' mean loss."""
    steps = tuple(replace(step, zero="none") for step in program.steps)
    program = replace(program, steps=steps)
    try:
        expected = run_locally(program, 3)
    except WeakProgramError:
        return
    net = Net(program)
    optimizer = optimizer_of(program, net)
    for number, step in enumerate(program.steps):
        if step.kind == "change_lr":
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        if step.kind == "train":
            net.zero_grad()
            sum(loss_of(net, program, number, rank, 3) for rank in range(3)).div(3).backward()
            for name, parameter in net.named_parameters():
                for rank in range(3):
                    assert same(expected[number][rank].gradients[name], parameter.grad)
            if step.optimize:
                optimizer.step()


def test_a_difference_names_parameter_bucket_and_ratio():
    program = program_of(PLAIN, ["train"], 2)
    (expected,) = run_locally(program, 2)
    wrong = dict(expected[0].gradients)
    name = next(iter(wrong))
    wrong[name] = wrong[name] * 0.5
    got = expected[0]._replace(gradients=wrong, buckets=((1,), (0, 2)))
    found = compare(got, expected[0], iteration=7, rank=1)
    assert found == "iteration 7, rank 1: gradient of 'w0' (bucket 1 of 2): 0.5 times the expected value"
    assert describe_difference(None, torch.ones(1)) == "got None, expected a tensor"
    assert describe_difference(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0])) == (
        "2.5 times the expected value at 1 of 2 elements"
    )
    assert describe_difference(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0])) == (
        "2 of 2 elements differ; got 1 at [0], expected 2"
    )


@given(st.floats(0.01, 100), st.integers(1, 5))
def test_a_wrong_parameter_is_shown_with_its_value_because_a_ratio_to_it_means_nothing(factor, elements):
    """A parameter that an adapter had left as it was showed as 0.000587544 times the expected value."""
    want = Seen({}, {"w": torch.full((elements,), 3.0)}, {}, None)
    got = want._replace(parameters={"w": want.parameters["w"] * factor})
    found = compare(got, want, iteration=0, rank=0)
    assert not found or f"{elements} of {elements} elements differ; got " in found
