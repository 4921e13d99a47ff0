"""The sampled tokens themselves, as an auxiliary output."""

from collections.abc import Mapping, Sequence

from ..outputs import Batch, CommittedTokens, CopyTensor, HostStepRows
from .sampled_rows import DeviceSampledRows, RefusedToken, first_refusals

_NO_WEIGHT = (
    "No token had a positive probability: the logits are not finite, or grammar and logit bias rule out every token."
)


class DeviceSampledTokens(DeviceSampledRows):
    """Tokens of one step on the device.

    columns: `output_ids` (T,) int32 and `has_weight` (T,) bool: whether the token had a positive weight.
    """

    def copy_to_host(self, copy_tensor: CopyTensor) -> "HostSampledTokens":
        """Copy each column once and drop the device tensors."""
        return HostSampledTokens(self._copy_columns(copy_tensor), self.layout)


class HostSampledTokens(HostStepRows):
    """Tokens of one step on the host; `consume` appends `output_ids`."""

    def token_ids(self) -> list[list[int]]:
        """The tokens sampled for each request of the batch, in the order of its rows."""
        tokens = iter(self.columns["output_ids"].tolist())
        return [[next(tokens) for _ in range(count)] for count in self.layout.row_counts]

    def refused(self) -> Mapping[int, RefusedToken]:
        """Requests for which no token had a positive weight."""
        return first_refusals(self.layout, [None if has else _NO_WEIGHT for has in self.columns["has_weight"].tolist()])

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Append `output_ids` of the committed rows."""
        self.layout.append_kept({"output_ids": self._take_columns()["output_ids"]}, batch, commits)
