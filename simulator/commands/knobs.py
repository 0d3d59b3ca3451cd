"""`ddplab knobs`: everything that can be asked, with its unit and where a figure for it comes from."""

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ..fabric import Contention, Fabric, LevelEntry, Linear, Processor, Sharing, Timing, TopologyFile
from ..fabric.processor import HookCost
from ..iteration.comm_hook import HOOKS
from ..iteration.policy import Policy
from ..show import show_table, write_json
from ..workload.roofline import DEVICES, Device
from ..workload.variation import Straggler, Variation
from .arguments import Json

KNOBS: dict[str, type[BaseModel]] = {
    "what the reducer is told: --policy, arguments of `predict`": Policy,
    "how iterations differ: --variation": Variation,
    "a slow rank: --straggler": Straggler,
    "what collectives cost: --fabric-set, fields of a fabric file": Fabric,
    "a measured collective": Timing,
    "two collectives at a time": Sharing,
    "a topology file, YAML": TopologyFile,
    "one of its levels": LevelEntry,
    "what collectives cost the processor: `processor` of a fabric file": Processor,
    "computation beside collectives: `contention` of a processor": Contention,
    "what a comm hook computes: `hooks` of a processor": HookCost,
    "the two numbers of such a cost: `pack`, `copy_out`, `compress`, ...": Linear,
    "a data sheet: --device, --from, --to": Device,
}


def knobs(json_path: Json = None) -> None:
    """List everything that can be asked, with units and where the figures come from."""
    for title, record in KNOBS.items():
        show_table(_rows(record), title)
        print()
    print(f"comm hooks: {', '.join(HOOKS)}\ndata sheets: {', '.join(DEVICES)}")
    write_json(json_path, {record.__name__: _rows(record) for record in KNOBS.values()})


def _rows(record: type[BaseModel]) -> list[dict[str, str]]:
    return [
        {
            "name": name,
            "default": _default(field.default),
            "meaning": field.description or "",
        }
        for name, field in record.model_fields.items()
    ]


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return ""
    return "see below" if isinstance(value, BaseModel) else str(value)
