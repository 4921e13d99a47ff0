"""The pipeline group of a real device mesh, on two gloo processes."""

import os

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from hiddentap.capture.mixin import with_capture
from hiddentap.models.pipeline import PipelineGroup, pipeline_group_of
from support import tiny
from support.ports import free_port


def _stage(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    assert PipelineGroup.from_device_mesh(mesh) == PipelineGroup(world_size=2, rank_in_group=rank)
    model = with_capture(tiny.build("llama"))
    model._device_mesh = mesh  # where transformers keeps the mesh a model was distributed over
    assert pipeline_group_of(model).world_size == 2
    for layer_ids in (None, [1]):
        try:
            model.set_dspark_layers_to_capture(layer_ids)
        except NotImplementedError as refused:
            assert str(refused) == "DSPARK aux hidden capture requires PP=1."  # noqa: PT017
        else:
            raise AssertionError("capture on one of two stages was not refused")
    data_parallel = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    assert PipelineGroup.from_device_mesh(data_parallel) == PipelineGroup()
    dist.destroy_process_group()


def test_two_pipeline_stages_are_refused_and_two_data_ranks_are_not() -> None:
    mp.spawn(_stage, args=(free_port(),), nprocs=2)
