"""The sampled tokens themselves, as an auxiliary output."""

from collections.abc import Mapping, Sequence

from ..outputs import Batch, CommittedTokens, CopyTensor, HostStepRows
from .sampled_rows import DeviceSampledRows, requests_of_rows


class DeviceSampledTokens(DeviceSampledRows):
    """Tokens of one step on the device.

    columns: `output_ids` (T,) int32 and `has_weight` (T,) bool: whether the token had a positive weight.
    """

    def copy_to_host(self, copy_tensor: CopyTensor) -> "HostSampledTokens":
        """Copy each column once and drop the device tensors."""
        return HostSampledTokens(self._copy_columns(copy_tensor), self.layout)


class HostSampledTokens(HostStepRows):
    """Tokens of one step on the host; `consume` appends `output_ids`."""

    def token_ids(self) -> dict[int, int]:
        """The token sampled for each request that sampled one, by its index in the batch."""
        return dict(zip(requests_of_rows(self.layout), self.columns["output_ids"].tolist(), strict=True))

    def refused(self) -> Mapping[int, str]:
        """Requests for which no token had a positive weight."""
        flags = zip(requests_of_rows(self.layout), self.columns["has_weight"].tolist(), strict=True)
        return {
            index: "No token had a positive probability: the logits are not finite, or grammar and logit bias rule out "
            "every token."
            for index, has_weight in flags
            if not has_weight
        }

    def consume(self, batch: Batch, commits: Sequence[CommittedTokens | None]) -> None:
        """Append `output_ids` of the committed rows."""
        self.layout.append_kept({"output_ids": self._take_columns()["output_ids"]}, batch, commits)
