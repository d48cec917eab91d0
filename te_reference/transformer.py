"""The decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

Legend: B batch, S sequence, T packed tokens, D model width. Source: transformer_engine/pytorch/transformer.py.
"""

import torch
import torch.distributed as dist
from torch import nn

from te_reference.attention import MultiheadAttention
from te_reference.modules import LayerNormMLP, _require


class TransformerLayer(nn.Module):
    """Pre-norm decoder layer; submodules ``self_attention`` and ``layernorm_mlp``."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        params_dtype=None,
        fuse_qkv_params: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device=None,
        attn_input_format: str = "sbhd",
    ):
        super().__init__()
        _require(hidden_dropout == 0.0, f"hidden_dropout={hidden_dropout}: te_reference has none.")
        self.layer_number = layer_number
        shared = {
            "bias": bias,
            "normalization": normalization,
            "params_dtype": params_dtype,
            "device": device,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels=kv_channels,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            attn_mask_type=self_attn_mask_type,
            num_gqa_groups=num_gqa_groups,
            input_layernorm=True,
            fuse_qkv_params=fuse_qkv_params,
            qkv_format=attn_input_format,
            layer_number=layer_number,
            **shared,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation, **shared
        )

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | list[dist.ProcessGroup] | None,
        cp_global_ranks: list[int],
        cp_stream: object,
        cp_comm_type: str = "p2p",
    ) -> None:
        """As :meth:`te_reference.attention.DotProductAttention.set_context_parallel_group`."""
        self.self_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        hidden_states: torch.Tensor,
        self_attn_mask_type: str | None = None,
        is_first_microbatch: bool | None = None,
        **attention_kwargs,
    ) -> torch.Tensor:
        """[B, S, D] or [T, D] -> the same shape.

        Args:
            self_attn_mask_type: as ``attn_mask_type`` in :class:`MultiheadAttention`.
            is_first_microbatch: low precision: True: quantise the weights and keep them; False: take the kept ones
                (the weights have not changed); None: quantise, keep nothing.
            attention_kwargs: as in :class:`MultiheadAttention`.
        """
        hidden_states = hidden_states + self.self_attention(
            hidden_states,
            attn_mask_type=self_attn_mask_type,
            is_first_microbatch=is_first_microbatch,
            **attention_kwargs,
        )
        return hidden_states + self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
