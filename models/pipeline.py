"""The place of this process among pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .errors import UsageError


class PipelineCaptureError(UsageError, NotImplementedError):
    """Hidden states were asked of one stage of several."""


@runtime_checkable
class PipelineGroupLike(Protocol):
    """The interface of a pipeline group; an engine's own group object has it."""

    @property
    def world_size(self) -> int: ...
    @property
    def is_last_rank(self) -> bool: ...


@dataclass(frozen=True)
class PipelineGroup:
    """Rank and size along pipeline stages; one stage by default."""

    world_size: int = 1
    rank_in_group: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank_in_group < self.world_size:
            raise ValueError(f"rank_in_group must be in 0..{self.world_size - 1}; got {self.rank_in_group}.")

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, dimension: str = "pp") -> PipelineGroup:
        """Return the group along `dimension` of `mesh`; one stage where the mesh has no such dimension."""
        if dimension not in (mesh.mesh_dim_names or ()):
            return cls()
        return cls(world_size=mesh[dimension].size(), rank_in_group=mesh.get_local_rank(dimension))


def pipeline_group_of(model: nn.Module) -> PipelineGroup:
    """Return the group of the device mesh that `model` was distributed over, or one stage."""
    mesh = getattr(model, "device_mesh", None) or getattr(model, "_device_mesh", None)
    return PipelineGroup.from_device_mesh(mesh) if isinstance(mesh, DeviceMesh) else PipelineGroup()


def require_single_stage(group: PipelineGroupLike, algorithm: str) -> None:
    """Raise PipelineCaptureError where `group` has more than one pipeline stage."""
    if group.world_size > 1:
        raise PipelineCaptureError(f"{algorithm} aux hidden capture requires PP=1.")
