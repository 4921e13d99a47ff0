"""Where a process stands among pipeline stages."""

import pytest

from hiddentap.models.pipeline import PipelineGroup, pipeline_group_of
from support import tiny


def test_one_stage_is_first_and_last() -> None:
    group = PipelineGroup()
    assert (group.world_size, group.rank_in_group, group.is_first_rank, group.is_last_rank) == (1, 0, True, True)


def test_a_middle_stage_is_neither_first_nor_last() -> None:
    group = PipelineGroup(world_size=3, rank_in_group=1)
    assert (group.is_first_rank, group.is_last_rank) == (False, False)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank_in_group must be in 0\.\.1; got 2"):
        PipelineGroup(world_size=2, rank_in_group=2)


def test_a_model_without_a_mesh_has_one_stage() -> None:
    assert pipeline_group_of(tiny.build("llama")) == PipelineGroup()
