"""Join: what a rank that ran out of inputs does so that the others can go on."""

from typing import Any

from torch.distributed.algorithms.join import JoinHook


class DataParallelJoinHook(JoinHook):
    """Matches every collective of the iterations that other ranks still run (torch: `_DDPJoinHook`).

    Args:
        ddp: The data-parallel module of this rank.
    """

    def __init__(self, ddp: Any) -> None:
        super().__init__()
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one forward and backward pass, collective by collective in the order of a real one."""
        ddp = self._ddp
        ddp.reducer.rebuild_if_due()
        ddp.shadow_buffer_sync()
        averaging = ddp.agree_on_averaging(wanted=False)
        ddp.require_forward_param_sync = averaging
        if averaging:
            ddp.reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001 - torch's signature
        """All ranks end with the model of one that had inputs to the end."""
        self._ddp.sync_final_model(is_last_joiner=is_last_joiner)
