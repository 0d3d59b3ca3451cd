"""A module's synchronised parameters and buffers: each once, by its first name, without the ignored ones."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddplab.reference.parameters import ModuleTensors, dense_strides

NAMES = "abcdef"


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=len(NAMES)),
    st.sets(st.integers(0, 3)),
    st.sets(st.sampled_from(NAMES)),
)
def test_a_shared_parameter_counts_once_under_its_first_name_that_is_not_ignored(which, frozen, ignored):
    """Name i of the module is that of tensor `which[i]`."""
    tensors = [nn.Parameter(torch.zeros(1), requires_grad=number not in frozen) for number in range(4)]
    module = nn.Module()
    module._ddp_params_and_buffers_to_ignore = ignored
    for name, number in zip(NAMES, which, strict=False):
        module.register_parameter(name, tensors[number])
    first = {}
    for name, number in zip(NAMES, which, strict=False):
        if number not in frozen and name not in ignored:
            first.setdefault(number, name)
    found = ModuleTensors(module, {})
    assert {name: id(one) for name, one in found.trainable.items()} == {
        name: id(tensors[number]) for number, name in first.items()
    }
    assert list(found.trainable) == sorted(first.values())
    places = [(name, id(tensors[number])) for name, number in zip(NAMES, which, strict=False) if number in first]
    assert [(slot.name, id(slot.parameter)) for slot in found.slots] == places


class Hides(nn.Linear):
    """Has the signature of older versions of torch, and leaves its bias out."""

    def named_parameters(self, prefix="", recurse=True):
        return [(name, one) for name, one in super().named_parameters(prefix, recurse) if not name.endswith("bias")]


def test_every_parameter_is_averaged_whatever_a_module_lists():
    """Torch's class calls the method of each layer; ours called that of the module, so it raised TypeError here."""
    outer = nn.Sequential(Hides(2, 1))
    outer.named_parameters = lambda prefix="", recurse=True: iter([])
    assert list(ModuleTensors(outer, {}).trainable) == ["0.weight", "0.bias"]


def test_ignored_and_sparse_tensors_are_told_apart_by_name():
    module = nn.ModuleDict({"rows": nn.Embedding(3, 2, sparse=True), "norm": nn.BatchNorm1d(2)})
    module._ddp_params_and_buffers_to_ignore = ["norm.running_mean", "norm.weight"]
    found = ModuleTensors(module, {})
    assert list(found.trainable) == ["rows.weight", "norm.bias"]
    assert found.sparse == {"rows.weight"}
    assert list(found.buffers) == ["norm.running_var", "norm.num_batches_tracked"]


def test_strides_of_dimensions_of_one_element_do_not_count():
    assert dense_strides(torch.empty(2, 1, 3)) == dense_strides(torch.empty(2, 3)) == [3, 1]
    assert dense_strides(torch.empty(1, 4, 1).transpose(0, 2)) == [1]
