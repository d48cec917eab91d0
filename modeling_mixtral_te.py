"""Mixtral on TransformerEngine layers: Llama's attention, and a mixture of SwiGLU experts in place of the MLP.

Legend: B batch, S sequence, T tokens (B*S or packed), D model width, E experts, L layers. The experts:
mixture_of_experts.py.

Auxiliary losses, over the C real tokens (no padding) of one call and all L layers, with z the router's logits [E] and p
their softmax:

    load balancing  E * sum_e f_e P_e,  f_e = tokens that chose e / (L C),  P_e = sum of p_e / (L C)   (Hugging Face's)
    router z-loss   mean of logsumexp(z)^2                                                             (ST-MoE, eq. 5)

f_e P_e is a product of two means, so the loss of a global batch depends on how it is cut. Here it is the mean over the
micro-batches of their losses, weighted by their valid targets: the same for every number of ranks, ep size and
accumulation, and nothing for a global batch without any target. Both are added to the loss in training mode only:
validation stays nats per token.
Instead of a loss, ``router_bias_update_rate`` balances by a bias per expert that takes part in the choice alone
(Wang et al. 2024, arXiv 2408.15664).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput

import te_backend
from generation import CachedGenerationMixin, takes_padded_batches
from loss import IGNORE_INDEX, linear_cross_entropy
from mixture_of_experts import MixtureOfExperts, Router, RouterStatistics
from modeling_llama_te import (
    NVLlamaConfig,
    NVLlamaModel,
    NVLlamaPreTrainedModel,
    decoder_problems,
    shift_within_sequences,
)
from precision import PrecisionPlan


FUSED_MLP_TOKEN_ALIGNMENT = 256


class NVMixtralConfig(MixtralConfig):
    """``MixtralConfig`` plus how its layers run.

    Args:
        attn_input_format, self_attn_mask_type, te_backend, activation_checkpointing: as in ``NVLlamaConfig``.
        router_z_loss_coef: weight of the router z-loss; 0: none.
        router_bias_update_rate: step of the balancing bias per optimiser step; 0: no bias.
        expert_token_alignment: rows per expert are padded to a multiple of this and of what the layer's recipe needs
            (16 for FP8, 32 for MXFP8, 128 for block scaling and NVFP4); the fused grouped MLP needs 256.
        fused_grouped_mlp: run the experts as TE's one fused kernel (Blackwell, MXFP8); an error where that cannot be.
    """

    def __init__(
        self,
        attn_input_format: str = "bshd",
        self_attn_mask_type: str | None = None,
        te_backend: str = "auto",
        activation_checkpointing: str = "off",
        router_z_loss_coef: float = 0.0,
        router_bias_update_rate: float = 0.0,
        expert_token_alignment: int = 1,
        fused_grouped_mlp: bool = False,
        **kwargs: Any,
    ):
        self.attn_input_format = attn_input_format
        self.self_attn_mask_type = self_attn_mask_type
        self.te_backend = te_backend
        self.activation_checkpointing = activation_checkpointing
        self.router_z_loss_coef = router_z_loss_coef
        self.router_bias_update_rate = router_bias_update_rate
        self.expert_token_alignment = expert_token_alignment
        self.fused_grouped_mlp = fused_grouped_mlp
        super().__init__(**kwargs)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads

    attention_mask_type = NVLlamaConfig.attention_mask_type
    check = NVLlamaConfig.check

    def problems(self) -> list[str]:
        """Broken rules that the layers rely on."""
        return decoder_problems(self) + number_problems(self) or mixtral_problems(self)


def number_problems(config: NVMixtralConfig) -> list[str]:
    """Fields of Mixtral's own that are not the numbers they should be."""
    problems = []
    for name in ("num_experts_per_tok", "num_local_experts", "expert_token_alignment"):
        value = getattr(config, name)
        if not (isinstance(value, int) and value >= 1):
            problems.append(f"{name}={value!r} must be a whole number of at least 1.")
    for name in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"):
        value = getattr(config, name)
        if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            problems.append(f"{name}={value!r} must be a finite number of at least 0.")
    return problems


def mixtral_problems(config: NVMixtralConfig) -> list[str]:
    """Broken rules between the fields."""
    problems = []
    if config.num_experts_per_tok > config.num_local_experts:
        problems.append(
            f"num_experts_per_tok={config.num_experts_per_tok} must be at most num_local_experts="
            f"{config.num_local_experts}."
        )
    if config.hidden_size % 16 or config.intermediate_size % 16:
        problems.append(
            f"hidden_size={config.hidden_size} and intermediate_size={config.intermediate_size} must be multiples of "
            "16: the grouped products need it."
        )
    if config.attention_dropout or config.router_jitter_noise:
        problems.append("attention_dropout and router_jitter_noise must be 0: the layers have none.")
    if config.sliding_window is not None and config.sliding_window < config.max_position_embeddings:
        problems.append(
            f"sliding_window={config.sliding_window}: the layers attend to all earlier tokens; set it to null."
        )
    if config.fused_grouped_mlp:
        problems += [f"fused_grouped_mlp=true cannot run: {reason}" for reason in fused_grouped_mlp_obstacles(config)]
    return problems


def fused_grouped_mlp_obstacles(config: NVMixtralConfig) -> list[str]:
    """Why TE's fused grouped MLP cannot run here; empty if it can, given an MXFP8 recipe with E4M3 gradients."""
    obstacles = []
    if config.hidden_size % 64 or config.intermediate_size % 64:
        obstacles.append(
            f"hidden_size={config.hidden_size} and intermediate_size={config.intermediate_size} must be multiples "
            "of 64."
        )
    if config.expert_token_alignment % FUSED_MLP_TOKEN_ALIGNMENT:
        obstacles.append(
            f"expert_token_alignment={config.expert_token_alignment} must be a multiple of {FUSED_MLP_TOKEN_ALIGNMENT}."
        )
    te = te_backend.resolve(config.te_backend)
    kernel = getattr(getattr(te.ops, "fused", None), "GroupedMLP_CuTeGEMMGLU", None)
    if kernel is None:
        obstacles.append(
            "it is a kernel of TransformerEngine 2.20, and the layers here are te_reference or an older TE."
        )
    elif not kernel.is_supported():
        obstacles.append(
            "TE declines: it needs NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 in the environment before the import, compute "
            f"capability 10.x (here {'.'.join(map(str, torch.cuda.get_device_capability()))}) and "
            "nvidia-cudnn-frontend>=1.23.0."
        )
    return obstacles


class MixtralLayer(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: NVMixtralConfig, te: Any, precision: PrecisionPlan, index: int):
        super().__init__()
        self.layer_number = index + 1
        """From 1; nvdlfw-inspect names the layer after it, as it does TE's TransformerLayer."""
        factory = {"params_dtype": torch.get_default_dtype(), "device": te_backend.layer_device()}
        self.self_attention = te.MultiheadAttention(
            config.hidden_size,
            config.num_attention_heads,
            kv_channels=config.head_dim,
            num_gqa_groups=config.num_key_value_heads,
            attention_dropout=0.0,
            layernorm_epsilon=config.rms_norm_eps,
            layer_number=self.layer_number,
            attn_mask_type=config.attention_mask_type,
            qkv_format=config.attn_input_format,
            input_layernorm=True,
            normalization="RMSNorm",
            fuse_qkv_params=True,
            bias=False,
            **factory,
        )
        self.post_attention_layernorm = te.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **factory)
        self.mlp = MixtureOfExperts(config, te, precision, index)

    def forward(
        self,
        hidden: torch.Tensor,
        token_mask_T: torch.Tensor | None = None,
        self_attn_mask_type: str | None = None,
        **attention_kwargs: Any,
    ) -> tuple[torch.Tensor, RouterStatistics]:
        """[B, S, D] or [T, D] -> the same shape, and the router's statistics."""
        hidden = hidden + self.self_attention(hidden, attn_mask_type=self_attn_mask_type, **attention_kwargs)
        normed_TD = self.post_attention_layernorm(hidden).flatten(0, -2)
        mixed_TD, statistics = self.mlp(normed_TD, token_mask_T)
        return hidden + mixed_TD.view_as(hidden), statistics


@dataclass
class MixtralModelOutput(ModelOutput):
    last_hidden_state: torch.Tensor | None = None
    """[B, S, D] or [1, T, D]."""
    statistics: tuple[RouterStatistics, ...] | None = None
    """Of every layer."""
    num_tokens: torch.Tensor | None = None
    """Real tokens: scalar."""


@dataclass
class MixtralCausalLMOutput(ModelOutput):
    loss: torch.Tensor | None = None
    """What to minimise; in training mode with the auxiliary losses."""
    logits: torch.Tensor | None = None
    lm_loss: torch.Tensor | None = None
    """The cross entropy alone: nats per target."""
    aux_loss: torch.Tensor | None = None
    """Load-balancing loss before its coefficient; with ``num_items_in_batch`` this call's share of the global one."""
    z_loss: torch.Tensor | None = None
    """Likewise the router z-loss."""
    tokens_per_expert_LE: torch.Tensor | None = None
    """Real tokens that chose each expert."""
    entropy_sum_L: torch.Tensor | None = None
    """Sum over the real tokens of the router's entropy: nats."""
    num_tokens: torch.Tensor | None = None
    """Real tokens of this call."""


class NVMixtralModel(NVLlamaModel):
    """Embedding, decoder layers, final norm."""

    config_class = NVMixtralConfig
    _no_split_modules = ["MixtralLayer"]
    static_decoding = False  # the host must know how many tokens every expert gets

    def _build_layer(self, te: Any, index: int) -> nn.Module:
        return MixtralLayer(self.config, te, self.precision, index)

    @takes_padded_batches
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MixtralModelOutput:
        """As :meth:`NVLlamaModel.forward`; ``attention_mask`` [B, S] or [1, T] keeps padding out of the statistics."""
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden, layer_kwargs = self._attention_kwargs(hidden, **kwargs)
        mask_T = None if attention_mask is None else attention_mask.flatten().bool()
        layer_kwargs["token_mask_T"] = mask_T
        statistics = []
        with self.precision.region():
            for index, layer in enumerate(self.layers):
                with self.precision.layer(index):
                    hidden, layer_statistics = self._run(index, layer, hidden, layer_kwargs)
                statistics.append(layer_statistics)
        num_tokens = (
            hidden.new_tensor(hidden[..., 0].numel(), dtype=torch.float32) if mask_T is None else mask_T.sum().float()
        )
        hidden = self.norm(hidden)
        return MixtralModelOutput(
            last_hidden_state=hidden.unsqueeze(0) if hidden.ndim == 2 else hidden,
            statistics=tuple(statistics),
            num_tokens=num_tokens,
        )


class NVMixtralForCausalLM(CachedGenerationMixin, NVLlamaPreTrainedModel):
    """Mixtral with a language-model head; in training the logits are never materialised (loss.py)."""

    config_class = NVMixtralConfig
    _no_split_modules = ["MixtralLayer"]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NVMixtralConfig, precision: PrecisionPlan | None = None):
        super().__init__(config)
        self.model = NVMixtralModel(config, precision)
        self.lm_head = nn.Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            device=te_backend.layer_device(),
            dtype=torch.get_default_dtype(),
        )
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> MixtralCausalLMOutput:
        """Loss and, when asked for, logits; arguments as in ``NVLlamaForCausalLM.forward``."""
        output = self.model(input_ids=input_ids, **kwargs)
        hidden = output.last_hidden_state
        if shift_labels is None and labels is not None:
            shift_labels = shift_within_sequences(
                labels, kwargs.get("cu_seq_lens_q_padded", kwargs.get("cu_seq_lens_q"))
            )
        aux_loss, z_loss, tokens_per_expert_LE = self._auxiliary_losses(output)
        loss = lm_loss = logits = None
        if shift_labels is not None:
            lm_loss = loss = linear_cross_entropy(
                hidden.flatten(0, 1), self.lm_head.weight, shift_labels.flatten(), num_items_in_batch
            )
            if num_items_in_batch is not None:
                # A global batch without any valid target: 0 of 1, so that its gradients are 0, not 0/0.
                num_items = torch.as_tensor(num_items_in_batch, device=shift_labels.device).clamp(min=1)
                share = (shift_labels != IGNORE_INDEX).sum() / num_items
                aux_loss, z_loss = aux_loss * share, z_loss * share
            if self.training:
                config = self.config
                loss = lm_loss + config.router_aux_loss_coef * aux_loss + config.router_z_loss_coef * z_loss
        if output_logits or (output_logits is None and loss is None):
            logits = self.lm_head(hidden[:, -logits_to_keep:])
        return MixtralCausalLMOutput(
            loss=loss,
            logits=logits,
            lm_loss=lm_loss,
            aux_loss=aux_loss,
            z_loss=z_loss,
            tokens_per_expert_LE=tokens_per_expert_LE,
            entropy_sum_L=torch.stack([layer.entropy_sum for layer in output.statistics]),
            num_tokens=output.num_tokens,
        )

    def _auxiliary_losses(self, output: MixtralModelOutput) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Load-balancing loss and z-loss of one call, FP32 scalars, and the tokens per expert [L, E]."""
        tokens_LE, probability_LE, z_L, _ = (torch.stack(values) for values in zip(*output.statistics, strict=True))
        rows = len(output.statistics) * output.num_tokens.clamp(min=1)
        share_E, probability_E = tokens_LE.sum(0) / rows, probability_LE.sum(0) / rows
        return self.config.num_local_experts * (share_E * probability_E).sum(), z_L.sum() / rows, tokens_LE

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Router) and module.expert_bias is not None:
            init.zeros_(module.expert_bias)

    @torch.no_grad()
    def update_router_bias(self, tokens_per_expert_LE: torch.Tensor) -> None:
        """Raises the bias of every expert with less than the mean load, lowers the others': rate * sign(mean - load).

        Does nothing unless ``router_bias_update_rate`` is set. No host sync.

        Args:
            tokens_per_expert_LE: of the whole global batch, summed over all ranks and micro-batches.
        """
        rate = self.config.router_bias_update_rate
        if rate > 0:
            steps_LE = (tokens_per_expert_LE.mean(dim=1, keepdim=True) - tokens_per_expert_LE).sign() * rate
            for layer, step_E in zip(self.model.layers, steps_LE, strict=True):
                layer.mlp.gate.expert_bias += step_E
