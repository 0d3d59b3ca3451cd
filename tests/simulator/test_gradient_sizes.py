"""Sizes of gradients in a file of torch's profiler, and the buckets that they belong to."""

from dataclasses import replace

import numpy as np
import pytest

from ddplab.reference.trace import Parameter
from ddplab.simulator import import_profile

from . import profiler_files
from .profiler_files import REAL, SMALL, without, write


def test_a_model_gives_names_and_is_checked(tmp_path):
    document, _ = profiler_files.profile(replace(SMALL, noted_shapes=False))
    path = write(document, tmp_path / "rank0.json")
    given = [
        Parameter(name=f"layer.{number}", shape=shape, dtype="float32", size_bytes=4 * int(np.prod(shape)))
        for number, shape in enumerate(SMALL.shapes[::-1])
    ]
    named = import_profile([path], parameters=given).trace
    assert named.workload.parameters == tuple(given)
    assert named.layouts == import_profile([path]).trace.layouts
    with pytest.raises(ValueError, match=r"rank0.json: --model: expected a model with 4 trainable parameters"):
        import_profile([path], parameters=given[:3])
    with pytest.raises(ValueError, match=r"rank0.json: --model: expected a parameter of 48 bytes for gradient 0"):
        import_profile([path], parameters=[*given[:3], given[0]])


def test_gradients_in_another_order_than_in_their_buckets_are_found_by_their_bytes(tmp_path):
    """The gradient of 16 bytes became ready before the first bucket was launched but belongs to the second one."""
    script = replace(SMALL, shapes=((4,), (4, 3), (3, 2), (3,)), buckets=(2, 2))
    document, _ = profiler_files.profile(script)
    for one in document["traceEvents"]:
        if one["name"] == "record_param_comms":
            one["args"]["In msg nelems"] += {16: -4, 9: 4}[one["args"]["In msg nelems"]]
    imported = import_profile([write(document, tmp_path / "rank0.json")])
    assert imported.trace.layouts == (((2,), (3, 1, 0)),)
    assert any("of them count to a later bucket" in note for note in imported.notes)


def test_without_buckets_no_gradient_is_said_to_count_to_one(tmp_path):
    """Half of each bucket's bytes is one of its two equal gradients, as a hook to half precision sends them."""
    document, _ = profiler_files.profile(replace(SMALL, shapes=((4,),) * 4, buckets=(2, 2)))
    for one in document["traceEvents"]:
        if one["name"] == "record_param_comms":
            one["args"]["In msg nelems"] //= 2
    imported = import_profile([write(document, tmp_path / "rank0.json")])
    assert not imported.trace.layouts
    assert any("as with a comm hook that compresses; the trace has no buckets" in note for note in imported.notes)
    assert not any("count to a later bucket" in note for note in imported.notes)


def test_without_shapes_and_copies_a_model_is_needed(tmp_path):
    document, _ = profiler_files.profile(replace(SMALL, noted_shapes=False))
    path = write(without(document, profiler_files.COPY_OUT), tmp_path / "rank0.json")
    with pytest.raises(ValueError, match=r"profile with record_shapes=True, or give the model with --model$"):
        import_profile([path])


def test_the_buckets_of_a_model_with_parameters_outside_its_data_parallelism():
    imported = import_profile([REAL / "a100x8_recommendation_rank3.json.gz"])
    report = imported.to_json()
    assert (report["world_size"], report["ranks"], report["steps"], report["gradients"]) == (8, [3], 6, 256)
    assert report["buckets_bytes"] == [181240752, 1068160, 17728292]
    buckets = [sum(imported.trace.sizes_bytes[index] for index in bucket) for bucket in imported.trace.layouts[0]]
    assert buckets == report["buckets_bytes"]
    assert any(note.startswith("3 gradients were accumulated after the last bucket") for note in imported.notes)
