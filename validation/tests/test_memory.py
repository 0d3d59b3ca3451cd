"""Counted memory against what one H100 held, by torch's allocator; `make gpu` measured it, in one process."""

import gzip
import json
from pathlib import Path

import pytest

from simulator.workload.built_in_operations import built_in_operations

RUNS = Path(__file__).parent.parent / "gpu"
MEASURED = {
    name: row
    for path in RUNS.glob("*/memory.json.gz")
    for rows in json.loads(gzip.decompress(path.read_bytes()))["values"].values()
    for name, row in rows.items()
}
"""Rows by model, batch size, precision, optimiser and wrapper."""


@pytest.mark.parametrize("name", [name for name in MEASURED if name.endswith(", module")])
def test_forward_and_backward_hold_what_was_measured(name):
    """What autograd keeps, and the peak, beyond what was there before the step."""
    model, batch, precision, _, _ = name.split(", ")
    row = MEASURED[name]
    operations = built_in_operations(model, {"bf16": "bfloat16"}.get(precision))
    assert operations is not None
    assert operations.memory is not None
    memory = operations.memory.with_batch(int(batch.removeprefix("batch ")))
    before = row["allocated, between steps"]
    assert memory.kept_bytes == pytest.approx(row["allocated, after forward"] - before, rel=0.01)
    # AdamW's temporaries, as many bytes as the parameters and gradients, exceed the peak of small batches.
    peak = max(memory.peak_with_gradients_bytes, 2 * row["parameters"] if ", adamw," in name else 0)
    assert peak == pytest.approx(row["peak allocated"] - before, rel=0.025)
