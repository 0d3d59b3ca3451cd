"""Count the operations of all built-in models and write the file from which `ddplab plan` reads them.

Run `python -m validation.count_built_in_models` after a change of a built-in model or of the counter; 30 seconds.
"""

import gzip
import json
from typing import Any

from ddplab.memory_counter import measure_memory
from ddplab.models import BUILT_IN
from ddplab.operation_counter import measure_operations
from reference.files.writing import write_atomically
from simulator.workload.built_in_operations import FILE, PARAMETERS_DTYPE

ELEMENT_TYPES = (None, "bfloat16", "float16")
"""Element types of autocast that data sheets of the catalogue have."""


def count(model: str, autocast: str | None) -> dict[str, Any]:
    """Count the operations and the memory of a model; returns the fields of `Operations` that the file has."""
    counted = measure_operations(model, autocast=autocast)
    memory = measure_memory(model, autocast=autocast)
    return counted.model_copy(update={"memory": memory}).model_dump(mode="json", exclude_defaults=True)


def main() -> None:
    """Write the file. It has no time in it, so equal counts give equal bytes."""
    counted = {name: {one or PARAMETERS_DTYPE: count(name, one) for one in ELEMENT_TYPES} for name in BUILT_IN}
    text = json.dumps(counted, separators=(",", ":"))
    write_atomically(FILE, gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
