"""What the states of stateful comm hooks have in common: they count iterations, and can be saved."""

import warnings
from typing import Any, ClassVar

import torch.distributed as dist


class HookState:
    """Saved and loaded like any object (`torch.save`, pickle), but for its process groups.

    A loaded state has None in their place, and where it was another group than all ranks, loading warns.

    Attributes:
        process_group: Ranks to average over. None: all.
        iter: Iterations so far.
    """

    GROUPS: ClassVar[tuple[str, ...]] = ("process_group",)
    """Attributes that hold process groups."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.iter = 0

    def __getstate__(self) -> dict[str, Any]:
        groups = {name: getattr(self, name) for name in self.GROUPS}
        ranks = {name: _ranks(group) for name, group in groups.items() if group is not None}
        return self.__dict__ | dict.fromkeys(groups) | {"_saved_ranks": ranks}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        ranks = saved.pop("_saved_ranks")
        self.__dict__.update(saved)
        for name, was in ranks.items():
            if name != "process_group" or not dist.is_initialized() or was != list(range(dist.get_world_size())):
                warnings.warn(
                    f"{type(self).__name__}: process groups are not saved, so {name} is None now. It had ranks "
                    f"{was}; set it again before training.",
                    stacklevel=2,
                )


def _ranks(group: dist.ProcessGroup) -> list[int] | str:
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return "that are not known any more: the group was destroyed"
