"""Rotary embedding, causal attention and the attention block with TransformerEngine's names and layouts.

Legend: B batch, S sequence, T packed tokens, D model width, N query heads, K KV heads (TE: GQA groups), H head dim,
R = N / K query heads per KV head.

Layouts: BSHD tensors are [B, S, heads, H]; THD tensors are [T, heads, H] with the documents back to back.
``cu_seqlens`` [documents + 1] int32 holds cumulative *real* lengths; ``cu_seqlens_padded`` the offsets of the
documents in the buffer where they are padded apart. QKV rows, interleaved: per KV head [q_0 .. q_{R-1}, k, v], each H
rows. RoPE rotates halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in FP32 with one rounding.
Sources: transformer_engine/pytorch/attention/{rope,multi_head_attention}.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from te_reference.modules import LayerNormLinear, Linear, _require


class RotaryPositionEmbedding(nn.Module):
    """Rotation angles [S, 1, 1, H] FP32: position * inv_freq, the half repeated."""

    def __init__(self, dim: int, rotary_base: float = 10000.0):
        super().__init__()
        inv_freq = 1.0 / rotary_base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        positions_S = torch.arange(offset, offset + max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        angles = torch.outer(positions_S, self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of the last dim of ``x`` [..., H]; ``cos`` and ``sin`` broadcast against [..., H/2]."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def thd_positions(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Position of every token of a packed buffer in its document: [T] int64. ``cu_seqlens`` are buffer offsets."""
    tokens_T = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document_T = torch.bucketize(tokens_T, cu_seqlens[1:], right=True).clamp_(max=cu_seqlens.numel() - 2)
    return (tokens_T - cu_seqlens[document_T]).long()


class DotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(H)) v under a causal mask, per sequence; no parameters."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
    ):
        super().__init__()
        _require(attention_dropout == 0.0, f"attention_dropout={attention_dropout}: te_reference has none.")
        _require(qkv_format in ("bshd", "thd"), f"qkv_format={qkv_format!r}: te_reference has bshd and thd.")
        allowed = ("padding_causal",) if qkv_format == "thd" else ("causal",)
        _require(attn_mask_type in allowed, f"attn_mask_type={attn_mask_type!r} with {qkv_format}: use {allowed[0]}.")
        self.qkv_format = qkv_format
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.scale = kv_channels**-0.5

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor:
        """[B, S, N, H] -> [B, S, N*H], or [T, N, H] -> [T, N*H]. Rows of padding between documents come back as
        zeros."""
        if self.qkv_format == "bshd":
            return self._causal(query_layer, key_layer, value_layer).flatten(-2)
        _require(cu_seqlens_q is not None, "thd attention needs cu_seqlens_q.")
        starts = (cu_seqlens_q_padded if pad_between_seqs else cu_seqlens_q).tolist()
        lengths = cu_seqlens_q.diff().tolist()
        out_TNH = torch.zeros_like(query_layer) if pad_between_seqs or sum(lengths) < len(query_layer) else None
        pieces = []
        for start, length in zip(starts, lengths, strict=False):
            if length == 0:
                continue
            q, k, v = (x[None, start : start + length] for x in (query_layer, key_layer, value_layer))
            piece = self._causal(q, k, v)[0]
            if out_TNH is None:
                pieces.append(piece)
            else:
                out_TNH[start : start + length] = piece
        return (torch.cat(pieces) if out_TNH is None else out_TNH).flatten(-2)

    def _causal(self, q_BSNH: torch.Tensor, k_BSKH: torch.Tensor, v_BSKH: torch.Tensor) -> torch.Tensor:
        repeat = self.num_attention_heads // self.num_gqa_groups
        if repeat > 1:  # the CPU kernel of sdpa has no grouped queries of its own: sharing by expand costs no memory
            k_BSKH, v_BSKH = (x.unsqueeze(3).expand(-1, -1, -1, repeat, -1).flatten(2, 3) for x in (k_BSKH, v_BSKH))
        q, k, v = (x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(1, 2)


class MultiheadAttention(nn.Module):
    """Norm, QKV, RoPE, attention, output projection.

    Parameters: ``layernorm_qkv.layer_norm_weight`` [D], ``layernorm_qkv.weight`` [(N+2K)H, D], ``proj.weight`` [D,
        N*H].
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        attn_mask_type: str = "causal",
        num_gqa_groups: int | None = None,
        params_dtype=None,
        input_layernorm: bool = False,
        fuse_qkv_params: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device=None,
        qkv_format: str = "sbhd",
        layer_number: int | None = None,
    ):
        super().__init__()
        _require(
            input_layernorm and fuse_qkv_params, "te_reference has input_layernorm=True, fuse_qkv_params=True only."
        )
        self.layer_number = layer_number
        self.num_kv_heads = num_gqa_groups or num_attention_heads
        self.head_dim = kv_channels or hidden_size // num_attention_heads
        _require(
            num_attention_heads % self.num_kv_heads == 0,
            f"num_attention_heads={num_attention_heads} is not a multiple of num_gqa_groups={self.num_kv_heads}.",
        )
        self.queries_per_kv = num_attention_heads // self.num_kv_heads
        factory = {"bias": bias, "params_dtype": params_dtype, "device": device}
        self.layernorm_qkv = LayerNormLinear(
            hidden_size,
            (num_attention_heads + 2 * self.num_kv_heads) * self.head_dim,
            eps=layernorm_epsilon,
            normalization=normalization,
            **factory,
        )
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.head_dim,
            num_gqa_groups=self.num_kv_heads,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
        )
        self.proj = Linear(num_attention_heads * self.head_dim, hidden_size, **factory)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary_pos_emb: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        pad_between_seqs: bool | None = None,
        **attention_kwargs,
    ) -> torch.Tensor:
        """[B, S, D] or [T, D] -> the same shape. ``rotary_pos_emb``: angles [S, 1, 1, H] FP32, S >= the longest
        sequence."""
        R = self.queries_per_kv
        # [..., K, R+2, H]: the queries of a KV head, its key, its value.
        qkv = self.layernorm_qkv(hidden_states).unflatten(-1, (self.num_kv_heads, R + 2, self.head_dim))
        qk, value = qkv[..., : R + 1, :], qkv[..., R + 1, :]
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb[:, 0, 0, : self.head_dim // 2]
            if cu_seqlens_q is not None:
                offsets = cu_seqlens_q_padded if pad_between_seqs else cu_seqlens_q
                angles = angles[thd_positions(offsets, hidden_states.shape[0]).clamp_(max=angles.shape[0] - 1)]
            else:
                angles = angles[: hidden_states.shape[1]]
            angles = angles[:, None, None, :]  # token, KV head, query, H/2
            qk = apply_rotary(qk, angles.cos(), angles.sin())
        query, key = qk[..., :R, :].flatten(-3, -2), qk[..., R, :]
        context = self.core_attention(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            pad_between_seqs=pad_between_seqs,
            **attention_kwargs,
        )
        return self.proj(context)
