"""Operations of the built-in models from a file, so that a prediction from names needs neither torch nor a count.

The file is gzipped JSON: by model, then by element type of autocast, the fields of `Operations`. A test compares it
with a count, and `python -m validation.count_built_in_models` writes it again.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...reference.files.reading import read_bytes
from .roofline import Operations

FILE = Path(__file__).with_name("built_in_operations.json.gz")
PARAMETERS_DTYPE = "none"
"""Key of the operations without autocast."""


@cache
def _counted() -> Mapping[str, Mapping[str, Any]]:
    counted: Mapping[str, Mapping[str, Any]] = json.loads(read_bytes(FILE))
    return counted


def counted_models() -> list[str]:
    """Return the names of the models in the file."""
    return list(_counted())


def built_in_operations(model: str, autocast: str | None = None) -> Operations | None:
    """Return the operations of a built-in model as `ddplab.operation_counter` counted them; None: not in the file.

    Args:
        model: Name of the model.
        autocast: Element type of torch.autocast, "bfloat16" or "float16". None: no autocast.
    """
    counted = _counted().get(model, {}).get(autocast or PARAMETERS_DTYPE)
    return None if counted is None else Operations.model_validate_json(json.dumps(counted))
