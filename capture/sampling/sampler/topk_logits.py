"""The largest logits of sampled rows, as an auxiliary output."""

from collections.abc import Sequence

from ...outputs import Batch, CommittedTokens, CopyTensor, HostStepRows
from .sampled_rows import DeviceSampledRows


class DeviceTopKLogits(DeviceSampledRows):
    """Top-k logits of one step on the device.

    columns: `topk_logits` (n, k) float32, `topk_ids` (n, k) int32, `topk_logsumexp` (n,) float32 and `topk_counts` (n,)
        int32: how many of the k columns each row's request asked for.
    """

    def copy_to_host(self, copy_tensor: CopyTensor) -> "HostTopKLogits":
        """Copy each column once and drop the device tensors."""
        return HostTopKLogits(self._copy_columns(copy_tensor), self.layout)


class HostTopKLogits(HostStepRows):
    """Top-k logits of one step on the host."""

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Append to every request as many logits per committed row as it asked for."""
        columns = self._take_columns()
        for kept in self.layout.kept_rows(batch, commits):
            # A request asks for the same number in all its rows.
            size = int(columns["topk_counts"][kept.rows.start])
            kept.request.rows.append(
                kept.first_position,
                {
                    "topk_logits": columns["topk_logits"][kept.rows, :size],
                    "topk_ids": columns["topk_ids"][kept.rows, :size],
                    "topk_logsumexp": columns["topk_logsumexp"][kept.rows],
                },
            )
