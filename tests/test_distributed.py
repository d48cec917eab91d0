"""distributed.py: one global gradient norm, whatever the meshes; errors that are printed once; the end of a process."""

import logging
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import distributed
from dist_utils import RanksFailed, run_on_ranks, run_script
from distributed import errors_once, global_grad_norm, init_distributed, together
from errors import ConfigError


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


@errors_once
def fails(how: str) -> None:
    rank = init_distributed().rank
    distributed.PATIENCE = timedelta(seconds=1)
    logging.basicConfig()
    logging.warning("a warning of rank %d", rank)
    if how == "all":
        raise ValueError("the same everywhere")
    if how == "one":
        assert rank == 0
        dist.barrier()
    if how == "config":
        raise ConfigError(f"a=1 of rank {rank}", "b=2")
    if how == "each its own":
        raise ValueError(f"one of rank {rank}")
    if how == "together":
        together(lambda: 1 // (1 - rank), RuntimeError, "no quotient")


def failure(how: str) -> RanksFailed:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(fails, 2, how, init=False)
    return failed.value


def test_an_error_of_all_ranks_is_printed_once():
    failed = failure("all")
    assert failed.exit_codes == [1, 1]
    assert str(failed).count("ValueError: the same everywhere") == 1
    assert "a warning of rank 1" in str(failed)


def test_problems_of_a_config_are_printed_without_a_traceback():
    failed = failure("config")
    assert failed.exit_codes == [1, 1]
    assert "\ninvalid configuration:\n  - a=1 of rank 0\n  - b=2\n" in str(failed)
    assert "a=1 of rank 1" in str(failed)
    assert "Traceback" not in str(failed)


def test_an_error_of_one_rank_is_printed_by_it():
    assert "rank 1:\nTraceback" in str(failure("one"))
    printed = str(failure("each its own"))
    assert "ValueError: one of rank 0" in printed and "ValueError: one of rank 1" in printed
    # All raise together's error, whose cause only rank 1 knows.
    assert "\nZeroDivisionError: integer division or modulo by zero\n\nThe above" in str(failure("together"))


def test_multirun_is_refused(tmp_path):
    argv = ["--config-name=L0_sanity", "num_train_steps=1", "validation.enabled=false", "checkpoint.ckpt_dir=null"]
    with pytest.raises(RanksFailed, match=r"ValueError: this process has had a run.* multirun .*not supported"):
        run_script("train_ddp.py", [*argv, "seed=1,2", "--multirun"], cwd=tmp_path)


def test_scripts_report_a_bad_config_and_log_once(tmp_path):
    argv = ["--config-name=L0_sanity", "num_train_steps=1", "validation.enabled=false", "fp8_config.enabled=true"]
    assert "".join(run_script("train_fsdp2_ep.py", argv, 2, cwd=tmp_path)).count("precision: ") == 1
    with pytest.raises(RanksFailed) as failed:
        run_script("train_fsdp2_ep.py", [*argv, "seed=-1"], 2, cwd=tmp_path)
    assert failed.value.exit_codes == [1, 1]
    assert str(failed.value).count("seed=-1 must be at least 0") == 1
