"""Expert parallelism: every rank holds E/ep experts, and tokens travel to the experts that they chose.

Legend: T this rank's tokens, D model width, E experts, e experts of one rank, A experts per token; R rows received.

Mesh (dp, ep), dp * ep = world size, row-major: the ranks of one ep group are neighbours. Every rank reads its own data.
Dense parameters are sharded over all ranks. Expert parameters [E, ...] are DTensors: Shard(0) over ep (rank r of its
group holds experts r*e .. (r+1)*e - 1) and, where dp > 1, Shard(1) over dp by FSDP. Global names and shapes do not
depend on the layout, so neither do initial weights, checkpoints and the optimiser's state.

One layer, forward (backward runs the same in reverse, with the same splits):

1. Each rank counts, per rank of its group, the tokens that have an expert there, and the tokens of each expert; one
   small all-to-all exchanges the counts. *The host waits here once per layer*: row counts must be known to allocate the
   buffers.
2. Tokens are permuted by destination rank, once per rank however many experts they chose there, and sent (all-to-all)
   with their router weights.
3. The received rows are permuted by expert, padded to the recipe's alignment, and go through the grouped experts. The
   rows of a token are summed on the rank, weights applied.
4. The sums travel back (all-to-all), and each token adds up what came from its ranks.

No token is ever dropped, and no rank skips a collective: one without tokens sends and receives empty buffers.

Gradients: the loss is a sum over ranks (loss.py), and an expert's gradient already holds the tokens of its whole ep
group, so every gradient is *summed* over the ranks that share the parameter: all of them for dense parameters, dp for
expert ones. ``distributed.sum_gradients`` tells FSDP, which would average.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import MixtralConfig

from distributed import HostCopy
from phases import phase


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, receive_counts, send_counts, group):
        ctx.counts, ctx.group = (receive_counts, send_counts), group
        received = x.new_empty(sum(receive_counts), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), receive_counts, send_counts, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        receive_counts, send_counts = ctx.counts
        sent = grad.new_empty(sum(send_counts), *grad.shape[1:])
        dist.all_to_all_single(sent, grad.contiguous(), send_counts, receive_counts, group=ctx.group)
        return sent, None, None, None


def all_to_all_rows(
    x: torch.Tensor, receive_counts: list[int], send_counts: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends the first ``send_counts[0]`` rows of ``x`` to rank 0 of the group, and so on; returns what came, rank by
    rank.

    Differentiable: gradients travel the other way.
    """
    return _AllToAll.apply(x, receive_counts, send_counts, group)


class DispatchState(NamedTuple):
    """What the way back needs."""

    row_id_map: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    num_tokens: int


class LocalTokens(NamedTuple):
    """The tokens that this rank's experts process."""

    rows_RD: torch.Tensor
    weights_Re: torch.Tensor
    """Router weights, 0 where not routed."""
    map_Re: torch.Tensor
    """bool."""
    tokens_per_expert_e: torch.Tensor
    """int64."""
    counts: HostCopy
    """``tokens_per_expert_e`` on its way to the host."""
    num_pairs: int
    """Sum of ``tokens_per_expert_e``, known to the host."""


class TokenDispatcher:
    """Moves tokens to the ranks of their experts and the experts' results back.

    Args:
        te: the layer backend.
        num_experts: E; a multiple of the group's size.
        group: the ep axis.
    """

    def __init__(self, te: Any, num_experts: int, group: dist.ProcessGroup):
        self._te, self._group = te, group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._experts_per_rank = num_experts // self._ranks

    # Not compiled: the host waits inside, and compiled code has no named phases.
    @torch.compiler.disable
    def dispatch(
        self, x_TD: torch.Tensor, weights_TE: torch.Tensor, map_TE: torch.Tensor
    ) -> tuple[LocalTokens, DispatchState]:
        """Sends every token to the ranks that hold its experts."""
        with phase("dispatch"):
            ranks, e = self._ranks, self._experts_per_rank
            map_Tre = map_TE.unflatten(1, (ranks, e))
            map_Tr = map_Tre.any(dim=2)
            # Per destination rank: rows, then tokens of each of its experts.
            sent = torch.cat((map_Tr.sum(0).unsqueeze(1), map_Tre.sum(0)), dim=1)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self._group)
            tokens_per_expert_e = received[:, 1:].sum(0)
            expert_counts = HostCopy(tokens_per_expert_e)
            # The host waits for the device here.
            counts = torch.cat((sent[:, 0], received[:, 0], tokens_per_expert_e.sum(0, keepdim=True))).tolist()
            send_counts, receive_counts, num_pairs = counts[:ranks], counts[ranks : 2 * ranks], counts[-1]

            rows, row_id_map = self._te.moe_permute(x_TD, map_Tr, sum(send_counts))
            # A weight of -1 says "not routed": it travels with the weights, where 0 may be a weight that underflowed.
            marked_TE = torch.where(map_TE, weights_TE, -1.0)
            marked, _ = self._te.moe_permute(marked_TE, map_Tr, sum(send_counts))
            rows_RD = all_to_all_rows(rows, receive_counts, send_counts, self._group)
            marked_RE = all_to_all_rows(marked, receive_counts, send_counts, self._group)
            marked_Re = marked_RE[:, self._rank * e : (self._rank + 1) * e]
            map_Re = marked_Re >= 0
            weights_Re = torch.where(map_Re, marked_Re, 0.0)
            tokens = LocalTokens(rows_RD, weights_Re, map_Re, tokens_per_expert_e, expert_counts, num_pairs)
            return tokens, DispatchState(row_id_map, send_counts, receive_counts, x_TD.shape[0])

    @torch.compiler.disable
    def combine(self, y_RD: torch.Tensor, state: DispatchState) -> torch.Tensor:
        """Sends the experts' results back and sums those of each token: [T, D]."""
        with phase("combine"):
            rows = all_to_all_rows(y_RD, state.send_counts, state.receive_counts, self._group)
            return self._te.moe_unpermute(
                rows, state.row_id_map, restore_shape=torch.Size((state.num_tokens, y_RD.shape[1]))
            )


def expert_blocks(model: nn.Module) -> list[nn.Module]:
    """The mixture-of-experts block of every layer of an ``NVMixtralForCausalLM``."""
    return [layer.mlp for layer in model.model.layers]


def check_layout(model_config: MixtralConfig, dp_size: int, ep_size: int) -> None:
    """Rules that the experts' sharding relies on; before anything is built.

    Raises:
        ValueError: the experts cannot be spread evenly.
    """
    problems = []
    if model_config.num_local_experts % ep_size:
        problems.append(
            f"num_local_experts={model_config.num_local_experts} is not divisible by parallelism.ep_size={ep_size}: "
            "choose a divisor."
        )
    if model_config.hidden_size % dp_size or 2 * model_config.intermediate_size % dp_size:
        problems.append(
            f"hidden_size={model_config.hidden_size} or 2 * intermediate_size={2 * model_config.intermediate_size} is "
            f"not divisible by parallelism.dp_size={dp_size}, over which the rows of each expert are sharded."
        )
    if problems:
        raise ValueError("invalid parallel layout:\n" + "\n".join(f"  - {problem}" for problem in problems))


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves on each rank its own experts, as DTensors Shard(0) over the ep axis, and makes the blocks dispatch tokens.

    Call it before ``fully_shard``, with a layout that :func:`check_layout` allows. One rank has nothing to shard.
    """
    ep_mesh = mesh["ep"]
    ranks = ep_mesh.size()
    if ranks == 1:
        return
    for block in expert_blocks(model):
        for name, parameter in list(block.experts.named_parameters(recurse=False)):
            local = parameter.detach().chunk(ranks)[ep_mesh.get_local_rank()].clone()
            sharded = DTensor.from_local(local, ep_mesh, [Shard(0)], run_check=False)
            block.experts.register_parameter(name, nn.Parameter(sharded))
        block.set_expert_parallel_mesh(mesh)


def fsdp_placement(parameter: nn.Parameter) -> Shard | None:
    """``shard_placement_fn`` of ``fully_shard``: experts [E, rows, columns] are cut along the rows, the rest as usual.

    Along dim 0 FSDP and ep would interleave, and more ranks than experts would leave some of them empty.
    """
    return Shard(1) if parameter.ndim == 3 else None
