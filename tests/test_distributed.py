"""distributed.py: one global gradient norm, whatever the meshes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dist_utils import RanksFailed, run_on_ranks, run_script
from distributed import global_grad_norm


def parameter_with_grad(value: list[float], grad: list[float] | None, mesh=None, placements=None) -> torch.nn.Parameter:
    def wrap(values: list[float]) -> torch.Tensor:
        local = torch.tensor(values)
        return local if mesh is None else DTensor.from_local(local, mesh, placements)

    parameter = torch.nn.Parameter(wrap(value))
    if grad is not None:
        parameter.grad = wrap(grad)
    return parameter


def norm_over_meshes() -> float:
    """Two ranks. Sharded gradient (3 | 4), replicated 12, sharded over one axis of a 2-D mesh (84 on both rows)."""
    rank = dist.get_rank()
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    parameters = [
        parameter_with_grad([0.0], [[3.0], [4.0]][rank], line, [Shard(0)]),
        parameter_with_grad([0.0], [12.0], line, [Replicate()]),
        parameter_with_grad([0.0], [84.0], grid, [Replicate(), Shard(0)]),
    ]
    return global_grad_norm(parameters).item()


def norm_with_an_idle_rank() -> float:
    """Pitfall 17: unequal expert gradients; rank 1's expert had no token, and must still take part."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    expert = parameter_with_grad([0.0, 0.0], [3.0, 4.0] if rank == 0 else None, mesh, [Shard(0)])
    dense = parameter_with_grad([0.0], [12.0])
    return global_grad_norm([expert, dense]).item()


def test_every_element_counts_once():
    """3-4-5, 5-12-13, 13-84-85, on both ranks."""
    assert run_on_ranks(norm_over_meshes, 2) == pytest.approx([85.0, 85.0])


def test_a_rank_without_gradients_gets_the_same_norm():
    assert run_on_ranks(norm_with_an_idle_rank, 2) == pytest.approx([13.0, 13.0])


def test_bf16_gradients_are_squared_in_fp32():
    """65,536 times 1/8 beside 256: a BF16 sum of squares would lose all of them."""
    parameter = torch.nn.Parameter(torch.zeros(1 + 2**16, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 2.0**-3)
    parameter.grad[0] = 256.0
    assert global_grad_norm([parameter]).item() == pytest.approx((2**16 * 2**-6 + 2**16) ** 0.5, rel=1e-5)


LEAVES = """
import atexit
from distributed import init_distributed, shut_down

init_distributed()
atexit.register(print, "exit handler")
print("output", end=" ")
shut_down(3)
"""


def test_shut_down_runs_exit_handlers_and_flushes(tmp_path):
    """It leaves without finalising the interpreter (see its docstring), yet nothing that was printed is lost."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    repository = str(Path(__file__).resolve().parents[1])
    with pytest.raises(RanksFailed) as failed:
        run_script(script, world_size=2, environment={"PYTHONPATH": repository})
    assert failed.value.exit_codes == [3, 3]
    assert str(failed.value).count("output exit handler") == 2
