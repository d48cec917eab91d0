"""Router, grouped experts and the mixture-of-experts block.

Legend: T tokens, D model width, F FFN width of an expert, E experts, e experts of this rank, A experts per token, R
rows of the permuted buffer.

Router, in FP32, for the token's normed state x: z = W x [E]; the A largest z are chosen; their weights are the softmax
over those A. Output: sum over the chosen experts of weight * down(silu(gate(x)) * up(x)). All experts are one chain of
grouped operations (``te.ops``) over the rows sorted by expert; the weight is applied inside the activation.

Low precision: both products of an expert in its layer's recipe; the router, its inputs and weights stay in high
precision. The rows of every expert are padded with zeros to what the recipe needs: they add nothing to any gradient.

Host syncs: before Blackwell TE's grouped products read the tokens per expert on the host. They get there once per layer
and forward pass, while the device permutes the rows (:class:`SplitSizes`). Padding (``alignment`` > 1) reads them too.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import MixtralConfig

import te_backend
from distributed import HostCopy
from expert_parallel import LocalTokens, TokenDispatcher
from precision import PrecisionPlan
from quantized_parameters import is_quantized
from stacked_weights import hold_quantized
from te_reference.emulated_linear import packed


FUSED_MLP_INTERLEAVE = 32  # TE's fused kernel wants blocks of 32 gate rows and 32 up rows in turn


class SplitSizes(torch.Tensor):
    """Rows per expert, int64 [e] on the device, on their way to the host.

    TE's products take them from ``tolist``, two in every forward and two in every backward pass, each of which would
    wait for the device. Here the first waits for the tokens per expert only, and the others for nothing.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, splits_e: torch.Tensor, counts: HostCopy, alignment: int) -> "SplitSizes":
        """``splits_e``: ``counts``, each rounded up to a multiple of ``alignment``."""
        self = splits_e.as_subclass(cls)
        self._counts, self._alignment = counts, alignment
        return self

    def tolist(self) -> list[int]:
        return [-(-count // self._alignment) * self._alignment for count in self._counts.read().tolist()]


class RouterStatistics(NamedTuple):
    """One layer's router over the real tokens of one call; FP32."""

    tokens_per_expert_E: torch.Tensor
    probability_sum_E: torch.Tensor
    """With gradient."""
    z_sum: torch.Tensor
    """Sum of logsumexp^2, with gradient."""
    entropy_sum: torch.Tensor
    """Sum of the entropies of p, nats."""


class _RouterSums(torch.autograd.Function):
    """Sums over the tokens of p [E], logsumexp(z)^2 and the entropy of p (no gradient), with p = softmax(z).

    With gradients g [E] of the first and h of the second: dz = p (g + 2 h logsumexp(z) - p.g).
    """

    @staticmethod
    def forward(ctx, logits_TE, token_mask_T1):
        log_sum_T1 = logits_TE.logsumexp(dim=1, keepdim=True)
        p_TE = (logits_TE - log_sum_T1).exp_()
        entropy_T1 = log_sum_T1 - (p_TE * logits_TE).sum(dim=1, keepdim=True)
        if token_mask_T1 is not None:
            p_TE, entropy_T1 = p_TE * token_mask_T1, entropy_T1 * token_mask_T1
            log_sum_T1 = log_sum_T1 * token_mask_T1
        ctx.save_for_backward(p_TE, log_sum_T1)
        return p_TE.sum(dim=0), log_sum_T1.square().sum(), entropy_T1.sum()

    @staticmethod
    def backward(ctx, g_E, h, _):
        p_TE, log_sum_T1 = ctx.saved_tensors
        return p_TE * (g_E + (2 * h * log_sum_T1 - p_TE @ g_E.unsqueeze(1))), None


def router_statistics(
    logits_TE: torch.Tensor, map_TE: torch.Tensor, token_mask_T: torch.Tensor | None
) -> RouterStatistics:
    """The sums over the real tokens, all of them if ``token_mask_T`` (bool) is None."""
    token_mask_T1 = None
    if token_mask_T is not None:
        token_mask_T1 = token_mask_T.unsqueeze(1)
        map_TE = map_TE & token_mask_T1
    return RouterStatistics(map_TE.sum(0).float(), *_RouterSums.apply(logits_TE, token_mask_T1))


class _RouterLogits(torch.autograd.Function):
    """z = x W^T in FP32 from operands of any dtype; keeps x as it is instead of an FP32 copy."""

    @staticmethod
    def forward(ctx, x_TD, weight_ED):
        ctx.save_for_backward(x_TD, weight_ED)
        if x_TD.is_cuda and x_TD.dtype != torch.float32:  # exact products, FP32 sums
            return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)
        return x_TD.float() @ weight_ED.float().t()

    @staticmethod
    def backward(ctx, dz_TE):
        x_TD, weight_ED = ctx.saved_tensors
        dx_TD = (dz_TE @ weight_ED.float()).to(x_TD.dtype)
        return dx_TD, (dz_TE.t() @ x_TD.float()).to(weight_ED.dtype)


class Router(nn.Module):
    """Chooses A experts per token; parameter ``weight`` [E, D], and the buffer ``expert_bias`` [E] FP32 if it balances
    by bias."""

    def __init__(self, config: MixtralConfig, te: Any):
        super().__init__()
        self._te, self.top_k = te, config.num_experts_per_tok
        factory = {"device": te_backend.layer_device()}
        self.weight = nn.Parameter(
            torch.empty(config.num_local_experts, config.hidden_size, dtype=torch.get_default_dtype(), **factory)
        )
        bias = None
        if config.router_bias_update_rate > 0:
            bias = torch.zeros(config.num_local_experts, dtype=torch.float32, **factory)
        self.register_buffer("expert_bias", bias)

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights [T, E] FP32 (0 where not chosen), map [T, E] bool, logits [T, E] FP32."""
        logits_TE = _RouterLogits.apply(x_TD, self.weight)
        if self.expert_bias is None:
            weights_TE, map_TE = self._te.router.fused_topk_with_score_function(
                logits_TE,
                topk=self.top_k,
                use_pre_softmax=False,
                num_groups=None,
                group_topk=None,
                scaling_factor=None,
                score_function="softmax",
                expert_bias=None,
            )
        else:
            weights_TE, map_TE = self._choose_with_bias(logits_TE)
        return weights_TE, map_TE, logits_TE

    def _choose_with_bias(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bias, in units of probability, takes part in the choice and not in the weights."""
        expert_TA = (logits_TE.detach().softmax(dim=1) + self.expert_bias).topk(self.top_k, dim=1).indices
        map_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, expert_TA, True)
        return logits_TE.masked_fill(~map_TE, float("-inf")).softmax(dim=1), map_TE


class _GroupedMLP(torch.autograd.Function):
    """Runs the grouped operations on stacked weights.

    TE's operations own one parameter per expert; the model has one [e, ...] tensor per matrix, which FSDP, DTensor and
    the optimiser handle as one. So the operations' parameters are made views of it, and the graph of the operations is
    run from here, forward and backward; their weight gradients come out as views of one buffer.
    """

    @staticmethod
    def forward(ctx, experts, rows_RD, splits_e, weights_R, fc1_weight, fc2_weight):
        operations, parameters = experts.bind(fc1_weight, fc2_weight)
        with torch.enable_grad():
            rows_RD, weights_R = rows_RD.detach().requires_grad_(), weights_R.detach().requires_grad_()
            y_RD = experts.compute(operations, rows_RD, splits_e, weights_R)
        # Edges, not tensors: nothing here keeps an activation alive that the operations themselves do not.
        edge = torch.autograd.graph.get_gradient_edge
        ctx.output, ctx.inputs = edge(y_RD), (edge(rows_RD), edge(weights_R), *parameters)
        ctx.experts = experts
        return y_RD.detach()

    @staticmethod
    def backward(ctx, dy_RD):
        drows_RD, dweights_R, *dparameters = torch.autograd.grad(ctx.output, ctx.inputs, dy_RD.contiguous())
        dfc1, dfc2 = ctx.experts.unbind_gradients(dparameters)
        ctx.output = ctx.inputs = None
        return None, drows_RD, None, dweights_R, dfc1, dfc2


class Experts(nn.Module):
    """The SwiGLU experts of one layer: ``fc1_weight`` [E, 2F, D] with rows [gate; up], ``fc2_weight`` [E, D, F].

    Under expert parallelism the parameters are DTensors, and this rank runs its own e experts.

    Args:
        precision: of the model. In low precision both products quantise each expert's rows, weight and gradient by
            itself, with scales of its own. Delayed scaling reduces their amaxes over the ranks that hold the same
            experts, so that the scales do not depend on the layout.
        index: of the layer, from 0.
    """

    def __init__(self, config: MixtralConfig, te: Any, precision: PrecisionPlan, index: int):
        super().__init__()
        E, D, F_ = config.num_local_experts, config.hidden_size, config.intermediate_size
        factory = {"device": te_backend.layer_device(), "dtype": torch.get_default_dtype()}
        self.fc1_weight = nn.Parameter(torch.empty(E, 2 * F_, D, **factory))
        self.fc2_weight = nn.Parameter(torch.empty(E, D, F_, **factory))
        self.alignment = math.lcm(config.expert_token_alignment, precision.group_rows(index))
        self.fused = config.fused_grouped_mlp
        self.recipe = precision.recipes[index]
        self.primary_weights_in_fp8 = precision.quantized_init and self.recipe is not None
        """Whether the weights are held in the compute format only (TE's name)."""
        self._te, self._precision, self._index = te, precision, index
        self._width, self._ffn = D, F_
        self._mesh: DeviceMesh | None = None
        # In a tuple, and so no submodule: its parameters are views and not the model's.
        self._operations: tuple[nn.Module, ...] = ()
        if self.primary_weights_in_fp8 and not self.fc1_weight.is_meta:
            self.reset_parameters()

    def set_mesh(self, mesh: DeviceMesh) -> None:
        """The (dp, ep) mesh over which the parameters are sharded."""
        self._mesh = mesh

    def reset_parameters(self) -> None:
        """Quantised init: turns the parameters, once they have memory, into the compute format; zeros."""
        for weight in (self.fc1_weight, self.fc2_weight):
            weight.detach().zero_()  # delayed scaling records what it quantises: nothing yet
        fc1, _, fc2 = self.bind(*self._local_weights())[0]
        order = (_interleave, _deinterleave) if self.fused else (None, None)
        hold = (self._te, self.recipe, self._precision.preserve_high_precision_init_val)
        self.fc1_weight = hold_quantized(self.fc1_weight, fc1, *hold, *order)
        self.fc2_weight = hold_quantized(self.fc2_weight, fc2, *hold)

    def scaling_tensors(self) -> dict[str, torch.Tensor]:
        """Delayed scaling: scales and amax histories of both products, input and weight of each expert in turn, by
        name; over ep as DTensors, like the weights. They share the products' memory, and are made where there are none
        yet."""
        fc1, _, fc2 = self._operations[0] if self._operations else self.bind(*self._local_weights())[0]
        tensors = {}
        for name, operation in (("fc1", fc1), ("fc2", fc2)):
            if operation._fp8_metas is None:
                operation.reset_recipe_state(recipe=self.recipe)
            for mode, key in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
                state = operation._fp8_metas[mode][key]
                tensors[f"{name}.{key}.scale"] = self._over_ep(state.scale, Shard(0))
                tensors[f"{name}.{key}.amax_history"] = self._over_ep(state.amax_history, Shard(1))
        return tensors

    def _over_ep(self, tensor: torch.Tensor, placement: Shard) -> torch.Tensor:
        if self._mesh is None:
            return tensor
        return DTensor.from_local(tensor, self._mesh["ep"], [placement], run_check=False)

    def _local_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.fc1_weight, self.fc2_weight)
        )

    def _scope(self) -> AbstractContextManager:
        if self._mesh is None or self.recipe is None or not self.recipe.delayed():
            return nullcontext()  # the layer's
        return self._te.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self._mesh["dp"].get_group())

    def compute(
        self, operations: nn.Module, rows_RD: torch.Tensor, splits_e: torch.Tensor, weights_R: torch.Tensor
    ) -> torch.Tensor:
        """Runs the grouped operations."""
        with self._scope():
            y_RD = operations(rows_RD, splits_e, weights_R, splits_e)
        if self.fused:
            _require_fused(operations)
        return y_RD

    def _run(self, rows_RD: torch.Tensor, splits_e: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
        fc1_weight, fc2_weight = self._local_weights()
        if not torch.is_grad_enabled():
            return self.compute(self.bind(fc1_weight, fc2_weight)[0], rows_RD, splits_e, weights_R)
        return _GroupedMLP.apply(self, rows_RD, splits_e, weights_R, fc1_weight, fc2_weight)

    def forward(self, tokens: LocalTokens) -> torch.Tensor:
        """The tokens' weighted sums over this rank's experts, [R, D]."""
        num_tokens = tokens.rows_RD.shape[0]
        if num_tokens == 0:
            # Every rank must run every expert's products and gradients, or those that reduce them would wait for it.
            rows = tokens.rows_RD.new_zeros(self.alignment, tokens.rows_RD.shape[1])
            splits_e = torch.zeros_like(tokens.tokens_per_expert_e)
            splits_e[0] = self.alignment
            weights = tokens.weights_Re.new_zeros(self.alignment)
            y = self._run(rows, splits_e, weights)
            return tokens.rows_RD + y[:0] + tokens.weights_Re[:, :1].to(y.dtype)
        if self.alignment > 1:
            rows, weights, row_id_map, pad_offsets, splits_e = self._te.moe_permute_and_pad_with_probs(
                tokens.rows_RD, tokens.weights_Re, tokens.map_Re, tokens.tokens_per_expert_e, self.alignment
            )
        else:
            rows, weights, row_id_map = self._te.moe_permute_with_probs(
                tokens.rows_RD, tokens.weights_Re, tokens.map_Re, tokens.num_pairs
            )
            pad_offsets, splits_e = None, tokens.tokens_per_expert_e
        y = self._run(rows, SplitSizes.of(splits_e, tokens.counts, self.alignment), weights)
        return self._te.moe_unpermute(y, row_id_map, restore_shape=tokens.rows_RD.shape, pad_offsets=pad_offsets)

    @torch.no_grad()
    def bind(self, fc1_weight: torch.Tensor, fc2_weight: torch.Tensor) -> tuple[nn.Module, tuple[nn.Parameter, ...]]:
        """The grouped operations and their parameters, views of the weights [e, 2F, D] and [e, D, F]."""
        if not self._operations:
            e = len(fc1_weight)
            # On the meta device: their parameters are replaced before anything is computed.
            factory = {"bias": False, "device": "meta", "dtype": fc1_weight.dtype}
            with self._precision.layer_init(self._index):
                fc1 = self._te.ops.GroupedLinear(e, self._width, 2 * self._ffn, **factory)
                fc2 = self._te.ops.GroupedLinear(e, self._ffn, self._width, **factory)
            activation = self._te.ops.ScaledSwiGLU(glu_interleave_size=FUSED_MLP_INTERLEAVE if self.fused else None)
            self._operations = (self._te.ops.Sequential(fc1, activation, fc2),)
        operations = self._operations[0]
        fc1, _, fc2 = operations
        _bind(fc1, _interleave(fc1_weight) if self.fused and not is_quantized(fc1_weight) else fc1_weight)
        _bind(fc2, fc2_weight)
        return operations, tuple(operations.parameters())

    def unbind_gradients(self, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the operations' parameters -> those of ``fc1_weight`` and ``fc2_weight``."""
        half = len(gradients) // 2
        dfc1, dfc2 = packed(gradients[:half]), packed(gradients[half:])
        return (_deinterleave(dfc1) if self.fused else dfc1), dfc2


def _bind(operation: nn.Module, weight_eOI: torch.Tensor) -> None:
    """Makes the parameters of a grouped operation those of the stack."""
    held = operation.weight0
    # FSDP gathers into new memory now and then, and quantised weights into new scales.
    if not (is_quantized(weight_eOI) or held.is_meta) and held.data_ptr() == weight_eOI.data_ptr():
        return
    for index, weight_OI in enumerate(weight_eOI.unbind(0)):
        name = f"weight{index}"
        held = getattr(operation, name)
        if is_quantized(weight_OI) or held.is_meta:
            if held is not weight_OI:
                operation.register_parameter(name, nn.Parameter(weight_OI))
        else:
            held.data = weight_OI


def _require_fused(operations: nn.Module) -> None:
    """TE declines to fuse without a word; this looks at what it ran."""
    ran = [type(operation).__name__ for operation, _ in operations._module_groups[0]._forward_ops]
    if ran != ["GroupedMLP_CuTeGEMMGLU"]:
        raise RuntimeError(
            f"fused_grouped_mlp=true, but TE ran {', '.join(ran)}: the fused kernel needs an MXFP8 recipe whose "
            "gradients are E4M3, too (fp8_format=E4M3). Change the recipe, or set fused_grouped_mlp=false."
        )


def _interleave(weight: torch.Tensor) -> torch.Tensor:
    """Rows [gate; up] of [e, 2F, D] -> blocks of 32 gate rows and 32 up rows in turn; a copy."""
    blocks = weight.unflatten(1, (2, -1, FUSED_MLP_INTERLEAVE))
    return blocks.transpose(1, 2).reshape(weight.shape)


def _deinterleave(weight: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_interleave`; a copy."""
    blocks = weight.unflatten(1, (-1, 2, FUSED_MLP_INTERLEAVE))
    return blocks.transpose(1, 2).reshape(weight.shape)


class MixtureOfExperts(nn.Module):
    """Router ``gate`` and ``experts``."""

    def __init__(self, config: MixtralConfig, te: Any, precision: PrecisionPlan, index: int):
        super().__init__()
        self._te, self._num_experts, self._top_k = te, config.num_local_experts, config.num_experts_per_tok
        self.gate = Router(config, te)
        self.experts = Experts(config, te, precision, index)
        self._dispatcher: TokenDispatcher | None = None

    def set_expert_parallel_mesh(self, mesh: DeviceMesh) -> None:
        """Dispatch tokens over the ep axis of ``mesh`` (dp, ep); the experts' parameters must be sharded over it."""
        self._dispatcher = TokenDispatcher(self._te, self._num_experts, mesh["ep"].get_group())
        self.experts.set_mesh(mesh)

    def forward(self, x_TD: torch.Tensor, token_mask_T: torch.Tensor | None) -> tuple[torch.Tensor, RouterStatistics]:
        """[T, D] -> [T, D]."""
        weights_TE, map_TE, logits_TE = self.gate(x_TD)
        if self._dispatcher is None:
            num_pairs, tokens_per_expert_E = x_TD.shape[0] * self._top_k, map_TE.sum(0)
            counts = HostCopy(tokens_per_expert_E)
            y_TD = self.experts(LocalTokens(x_TD, weights_TE, map_TE, tokens_per_expert_E, counts, num_pairs))
        else:
            tokens, state = self._dispatcher.dispatch(x_TD, weights_TE, map_TE)
            y_TD = self._dispatcher.combine(self.experts(tokens), state)
        # Last: many small kernels, which the host launches while the device is busy with the experts.
        return y_TD, router_statistics(logits_TE, map_TE, token_mask_T)


class RouterTotals:
    """The router's sums over one optimiser step: all micro-batches of all ranks, in one vector for one all-reduce.

    Args:
        config: of the model.
        device: of the model.
    """

    def __init__(self, config: MixtralConfig, device: torch.device):
        self._shape = (config.num_hidden_layers, config.num_local_experts)
        num_layers, num_experts = self._shape
        self._sums = torch.zeros(num_layers * (num_experts + 1) + 3, device=device)

    def add(self, output: Any) -> None:
        """Adds a micro-batch's ``MixtralCausalLMOutput``."""
        scalars = torch.stack((output.aux_loss, output.z_loss, output.num_tokens))
        self._sums += torch.cat((output.tokens_per_expert_LE.flatten(), output.entropy_sum_L, scalars)).detach()

    def all_reduce(self) -> None:
        """Sums over all ranks. No host sync."""
        dist.all_reduce(self._sums)

    @property
    def tokens_per_expert_LE(self) -> torch.Tensor:
        """Real tokens that chose each expert."""
        num_layers, num_experts = self._shape
        return self._sums[: num_layers * num_experts].view(num_layers, num_experts)

    def metrics(self) -> dict[str, Any]:
        """JSON values; lists have one entry per layer. Waits for the device."""
        load_LE = self.tokens_per_expert_LE
        entropy_sum_L, (aux_loss, z_loss, num_tokens) = self._sums[load_LE.numel() : -3], self._sums[-3:].unbind()
        # The coefficient of variation: standard deviation over the experts / mean. 0: perfectly balanced.
        variation_L = load_LE.std(dim=1, correction=0) / load_LE.mean(dim=1).clamp(min=1e-9)
        return {
            "aux_loss": aux_loss.item(),
            "router_z_loss": z_loss.item(),
            "tokens_per_expert_min": load_LE.amin(dim=1).int().tolist(),
            "tokens_per_expert_max": load_LE.amax(dim=1).int().tolist(),
            "tokens_per_expert_cv": variation_L.tolist(),
            "router_entropy": (entropy_sum_L / num_tokens).tolist(),  # nats; ln E is uniform
            "dropped_tokens": 0,
        }
