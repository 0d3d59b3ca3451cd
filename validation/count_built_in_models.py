"""Count the operations of all built-in models, of larger ones and of the score's cases, and write the files of them.

`ddplab plan` reads those of the built-in models, the score the others. Run `python -m
validation.count_built_in_models` after a change of a model, of a case or of the counter; a quarter of an hour.
"""

import gzip
import json
from typing import Any
from unittest.mock import patch

from ddplab.memory_counter import measure_memory
from ddplab.models import BUILT_IN
from ddplab.operation_counter import measure_operations
from ddplab.reference.files.writing import write_atomically
from ddplab.simulator.workload.roofline import OPERATIONS_FILE, PARAMETERS_DTYPE

from .larger_models import COUNTED
from .published_nodes import OPERATIONS, models_of_cases

ELEMENT_TYPES = (None, "bfloat16", "float16")
"""Element types of autocast that data sheets of the catalogue have."""


def count(model: str, autocast: str | None) -> dict[str, Any]:
    """Count the operations and the memory of a model; returns the fields of `Operations` that the file has."""
    with patch.dict(BUILT_IN, COUNTED):  # the counters find models by name
        counted = measure_operations(model, autocast=autocast)
        memory = measure_memory(model, autocast=autocast)
    return counted.model_copy(update={"memory": memory}).model_dump(mode="json", exclude_defaults=True)


def main() -> None:
    """Write the files. They have no time in them, so equal counts give equal bytes."""
    counted = {
        name: {one or PARAMETERS_DTYPE: count(name, one) for one in ELEMENT_TYPES} for name in (*BUILT_IN, *COUNTED)
    }
    for of_model in counted.values():
        plain = of_model[PARAMETERS_DTYPE]
        for one in [key for key, other in of_model.items() if other == plain and key != PARAMETERS_DTYPE]:
            del of_model[one]
    of_cases = {
        name: measure_operations(name).model_dump(mode="json", exclude_defaults=True) for name in models_of_cases()
    }
    for file, content in (OPERATIONS_FILE, counted), (OPERATIONS, of_cases):
        text = json.dumps(content, separators=(",", ":"))
        write_atomically(file, gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
