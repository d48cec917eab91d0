"""Rotary embedding, causal attention and the attention block with TransformerEngine's names and layouts.

Legend: B batch, S sequence, T packed tokens, D model width, N query heads, K KV heads (TE: GQA groups), H head dim,
R = N / K query heads per KV head.

Layouts: BSHD tensors are [B, S, heads, H]; THD tensors are [T, heads, H] with the documents back to back.
``cu_seqlens`` [documents + 1] int32 holds cumulative *real* lengths; ``cu_seqlens_padded`` the offsets of the documents
in the buffer where they are padded apart. QKV rows, interleaved: per KV head [q_0 .. q_{R-1}, k, v], each H rows.
RoPE rotates halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in FP32 with one rounding.
Under context parallelism a rank holds two chunks of every sequence (context_parallel.py); ``cu_seqlens`` stay global.
Sources: transformer_engine/pytorch/attention/{rope,multi_head_attention}.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from te_reference.context_parallel import Document, Ring, ring_attention, zigzag_indices
from te_reference.inference import InferenceParams
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


def _rotate_into(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the halves of the last dim of ``x`` in FP32 and rounds once, into ``out``."""
    exact = out if out.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
    # Factors of every head, and the halves swapped at once: a CPU takes ten times as long over rows of H / 2 numbers.
    shape = x.shape[-cos.ndim :]
    cos, sin = torch.cat((cos, cos), dim=-1).expand(shape), torch.cat((-sin, sin), dim=-1).expand(shape)
    x = x.float()
    torch.mul(x, cos.contiguous(), out=exact)
    exact.addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin.contiguous())
    if exact is not out:
        out.copy_(exact)


class _SplitAndRotate(torch.autograd.Function):
    """[..., K, R+2, H] -> rotated queries [..., K, R, H] and key, value [..., K, H].

    A rotation's gradient is the rotation back, so nothing but the angles is kept, and every gradient is written once,
    to where it belongs in that of the whole.
    """

    @staticmethod
    def forward(ctx, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        ctx.save_for_backward(cos, sin)
        ctx.shape = qkv.shape
        query, key, value = qkv.split((qkv.shape[-2] - 2, 1, 1), dim=-2)
        rotated = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)]
        for out, x in zip(rotated, (query, key), strict=True):
            _rotate_into(out, x, cos, sin)
        return rotated[0], rotated[1].squeeze(-2), value.squeeze(-2).clone()

    @staticmethod
    def backward(ctx, grad_query: torch.Tensor, grad_key: torch.Tensor, grad_value: torch.Tensor):
        cos, sin = ctx.saved_tensors
        grad = torch.empty(ctx.shape, dtype=grad_query.dtype, device=grad_query.device)
        query, key, value = grad.split((ctx.shape[-2] - 2, 1, 1), dim=-2)
        _rotate_into(query, grad_query, cos, -sin)
        _rotate_into(key, grad_key.unsqueeze(-2), cos, -sin)
        value.copy_(grad_value.unsqueeze(-2))
        return grad, None, None


def thd_positions(cu_seqlens: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
    """Position of tokens of a packed buffer in their documents, int64 [T].

    Args:
        cu_seqlens: buffer offsets of the documents, [documents + 1].
        tokens_T: indices into the buffer, int64.
    """
    offsets = cu_seqlens.long()
    document_T = torch.bucketize(tokens_T, offsets[1:], right=True).clamp_(max=offsets.numel() - 2)
    return tokens_T - offsets[document_T]


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
        layer_number: int | None = None,
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
        self.layer_number = layer_number
        self._ring: Ring | None = None

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | list[dist.ProcessGroup] | None,
        cp_global_ranks: list[int],
        cp_stream: object,
        cp_comm_type: str = "p2p",
    ) -> None:
        """From now on the inputs are this rank's chunks of every sequence.

        Whatever ``cp_comm_type`` says, KV blocks travel around a ring (context_parallel.py), with the result of every
        other scheme; what TE would refuse is refused.

        Args:
            cp_group: the group, or [a2a group, p2p group] for ``a2a+p2p``; None: no context parallelism.
            cp_global_ranks: global ranks of the whole group, in the order of the chunks.
            cp_stream: TE's side stream, unused here.
            cp_comm_type: ``p2p``, ``all_gather``, ``a2a`` or ``a2a+p2p``.
        """
        _require(
            cp_comm_type in ("p2p", "all_gather", "a2a", "a2a+p2p"),
            f"cp_comm_type={cp_comm_type!r} is not one of p2p, all_gather, a2a, a2a+p2p.",
        )
        self._ring = None
        if cp_group is None:
            return
        pair = isinstance(cp_group, list)
        _require(
            pair == (cp_comm_type == "a2a+p2p"),
            f"cp_comm_type={cp_comm_type!r}: a2a+p2p takes [a2a group, p2p group], the others take one group.",
        )
        ranks_per_a2a = dist.get_world_size(cp_group[0] if pair else cp_group) if "a2a" in cp_comm_type else 1
        _require(
            self.num_attention_heads % ranks_per_a2a == 0 and self.num_gqa_groups % ranks_per_a2a == 0,
            f"cp_comm_type={cp_comm_type!r} over {ranks_per_a2a} ranks must divide num_attention_heads="
            f"{self.num_attention_heads} and num_gqa_groups={self.num_gqa_groups}: use p2p or all_gather.",
        )
        if len(cp_global_ranks) > 1:
            self._ring = Ring(cp_group, cp_global_ranks)

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
        inference_params: InferenceParams | None = None,
    ) -> torch.Tensor:
        """[B, S, N, H] -> [B, S, N*H], or [T, N, H] -> [T, N*H]. Rows of padding between documents come back as 0.

        With ``inference_params`` the tokens are new ones, and see those in the cache, too.
        """
        if inference_params is not None:
            return self._with_cache(query_layer, key_layer, value_layer, inference_params).flatten(-2)
        if self._ring is not None:
            qkv = query_layer, key_layer, value_layer
            return self._over_ranks(*qkv, cu_seqlens_q, cu_seqlens_q_padded, pad_between_seqs)
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

    def _over_ranks(self, query, key, value, cu_seqlens, cu_seqlens_padded, pad_between_seqs) -> torch.Tensor:
        ring = self._ring
        if self.qkv_format == "bshd":
            chunk = query.shape[1] // 2
            documents: list[Document] = [(0, chunk, 2 * chunk * ring.size)]
            return ring_attention(query, key, value, documents, ring, self.scale).flatten(-2)
        _require(
            cu_seqlens is not None and cu_seqlens_padded is not None and bool(pad_between_seqs),
            "thd attention over several ranks needs cu_seqlens_q, cu_seqlens_q_padded and pad_between_seqs=True.",
        )
        offsets, lengths = cu_seqlens_padded.tolist(), cu_seqlens.diff().tolist()
        documents = [
            (start // ring.size, (stop - start) // (2 * ring.size), length)
            for start, stop, length in zip(offsets[:-1], offsets[1:], lengths, strict=True)
            if length > 0
        ]
        context = ring_attention(query[None], key[None], value[None], documents, ring, self.scale)
        return context[0].flatten(-2)

    def _with_cache(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inference_params: InferenceParams
    ) -> torch.Tensor:
        """Of [T, N, H] or, padded on the right, [B, S, N, H]: the same shape."""
        _require(self._ring is None, "a KV cache needs whole sequences: no context parallelism.")
        _require(self.layer_number is not None, "a KV cache needs layer_number: each layer has its own slot.")
        keys_BSKH, values_BSKH = inference_params.step(self.layer_number, k, v)
        if inference_params.decoding:
            # A KV head's R queries share one position: as R rows of one product, keys need not be repeated.
            q_BKRH = q.view(keys_BSKH.shape[0], self.num_gqa_groups, -1, q.shape[-1])
            out_BKRH = F.scaled_dot_product_attention(
                q_BKRH,
                keys_BSKH.transpose(1, 2),
                values_BSKH.transpose(1, 2),
                attn_mask=inference_params.visible(q.device),
                scale=self.scale,
            )
            return out_BKRH.reshape(q.shape)
        if q.ndim == 4 and not any(inference_params.old_lengths):
            return self._causal(q, k, v)
        counts = inference_params.new_lengths
        rows = q.split(counts) if q.ndim == 3 else q
        out = torch.zeros_like(q)
        out_rows = out.split(counts) if q.ndim == 3 else out
        for row, (count, length) in enumerate(zip(counts, inference_params.sequences.values(), strict=True)):
            k_row, v_row = keys_BSKH[row, None, :length], values_BSKH[row, None, :length]
            # Either all tokens are new, or the only new one sees them all.
            out_rows[row][:count] = self._causal(rows[row][None, :count], k_row, v_row, is_causal=count == length)[0]
        return out

    def _causal(
        self, q_BSNH: torch.Tensor, k_BSKH: torch.Tensor, v_BSKH: torch.Tensor, is_causal: bool = True
    ) -> torch.Tensor:
        repeat = self.num_attention_heads // self.num_gqa_groups
        q, k, v = (x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=self.scale, enable_gqa=repeat > 1
        ).transpose(1, 2)


class MultiheadAttention(nn.Module):
    """Norm, QKV, RoPE, attention, output projection.

    Parameters: ``layernorm_qkv.layer_norm_weight`` [D], ``layernorm_qkv.weight`` [(N+2K)H, D], ``proj.weight`` [D, NH].
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
        _require(input_layernorm and fuse_qkv_params, "te_reference has input_layernorm and fuse_qkv_params True only.")
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
            layer_number=layer_number,
        )
        self.proj = Linear(num_attention_heads * self.head_dim, hidden_size, **factory)
        self.cp_size, self.cp_rank = 1, 0

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | list[dist.ProcessGroup] | None,
        cp_global_ranks: list[int],
        cp_stream: object,
        cp_comm_type: str = "p2p",
    ) -> None:
        """As :meth:`DotProductAttention.set_context_parallel_group`; RoPE takes the chunks' positions."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.cp_size, self.cp_rank = 1, 0
        if cp_group is not None:
            self.cp_size, self.cp_rank = len(cp_global_ranks), list(cp_global_ranks).index(dist.get_rank())

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary_pos_emb: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        pad_between_seqs: bool | None = None,
        attn_mask_type: str | None = None,
        inference_params: InferenceParams | None = None,
        is_first_microbatch: bool | None = None,
        **attention_kwargs,
    ) -> torch.Tensor:
        """[B, S, D] or [T, D] -> the same shape; under context parallelism this rank's chunks of it.

        Args:
            hidden_states: [B, S, D] or [T, D].
            rotary_pos_emb: angles [positions, 1, 1, H] FP32, at least as many as the longest whole sequence has tokens.
            cu_seqlens_q, cu_seqlens_q_padded, pad_between_seqs, attention_kwargs: as :class:`DotProductAttention`.
            attn_mask_type: with ``inference_params`` padding_causal, as TE wants it; None otherwise.
            inference_params: the KV cache; the tokens are new ones, those of bshd padded on the right.
        """
        expected = None if inference_params is None else "padding_causal"
        _require(
            attn_mask_type in (None, expected),
            f"attn_mask_type={attn_mask_type!r}: only padding_causal with a KV cache.",
        )
        R = self.queries_per_kv
        # [..., K, R+2, H]: the queries of a KV head, its key, its value.
        qkv = self.layernorm_qkv(hidden_states, is_first_microbatch)
        qkv = qkv.unflatten(-1, (self.num_kv_heads, R + 2, self.head_dim))
        _require(rotary_pos_emb is not None, "te_reference.MultiheadAttention needs rotary_pos_emb.")
        angles = rotary_pos_emb[:, 0, 0, : self.head_dim // 2]
        if inference_params is not None:
            cos, sin = inference_params.rotation(angles, hidden_states)
        else:
            offsets = cu_seqlens_q_padded if pad_between_seqs else cu_seqlens_q
            angles = angles[self._positions(hidden_states, offsets, angles.shape[0])]
            angles = angles[:, None, None, :]  # token, KV head, query, H/2
            cos, sin = angles.cos(), angles.sin()
        query, key, value = _SplitAndRotate.apply(qkv, cos, sin)
        context = self.core_attention(
            query.flatten(-3, -2),
            key,
            value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            pad_between_seqs=pad_between_seqs,
            inference_params=inference_params,
            **attention_kwargs,
        )
        return self.proj(context, is_first_microbatch)

    def _positions(self, hidden_states: torch.Tensor, offsets: torch.Tensor | None, num_angles: int) -> torch.Tensor:
        """Position of every local token in its sequence: int64 [S] or [T]. ``offsets``: of the packed documents."""
        size, device = self.cp_size, hidden_states.device
        if offsets is None:
            length = hidden_states.shape[1] * size
            _require(num_angles >= length, f"rotary_pos_emb has {num_angles} positions, the sequences have {length}.")
            offsets = torch.tensor([0, length], device=device)
        if size == 1:
            tokens = torch.arange(hidden_states.shape[-2], device=device)
        else:
            tokens = zigzag_indices(offsets, self.cp_rank, size)
        return thd_positions(offsets, tokens).clamp_(max=num_angles - 1)  # rows behind the last document may exceed it
