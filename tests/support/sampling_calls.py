"""Sampling calls for tests: one request per row unless a row count says otherwise."""

from collections.abc import Sequence

from hiddentap.capture.outputs import RowLayout
from hiddentap.capture.sampling import SamplingInfo, SamplingParams, SamplingState


def sampling_info(
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[list[int]] | None = None,
    row_counts: Sequence[int] | None = None,
    first_positions: Sequence[int] | None = None,
) -> SamplingInfo:
    count = len(params)
    prompts = prompts or [()] * count
    outputs = outputs or [[] for _ in range(count)]
    states = [
        SamplingState.of(one, prompt, output) for one, prompt, output in zip(params, prompts, outputs, strict=True)
    ]
    layout = RowLayout(tuple(row_counts or [1] * count), tuple(first_positions or [0] * count), (0,) * count)
    return SamplingInfo(states, layout)
