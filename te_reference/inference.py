"""The KV cache of ``transformer_engine.pytorch.InferenceParams``, on any device.

Legend: B sequences, S cached tokens at most, T packed new tokens, K KV heads, H head dim.

Per layer the keys and values lie in [B, S, K, H] each, row b holding sequence b's tokens from position 0 on, keys after
RoPE. A step: :meth:`InferenceParams.pre_step` says which sequences get how many new tokens, then every layer's
attention calls :meth:`InferenceParams.step` with its new keys and values and attends to what comes back.

As in TE, a sequence that is already there advances by exactly one token, whatever the dictionary says; here another
number is an error. Sequences keep their order: those that stay, then new ones. TE's paged cache is not mirrored.
Source: transformer_engine/pytorch/attention/inference.py.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from te_reference.modules import _require


class KVCacheManager:
    """The tensors, and which sequence has how many tokens in them.

    Attributes:
        sequences: tokens of every sequence, the current step's included, in the order of the rows.
        cache: (keys, values) by layer number.
    """

    def __init__(
        self, max_batch_size: int, max_seqlen: int, num_heads: int, head_dim_k: int, dtype: torch.dtype, head_dim_v: int
    ):
        self.shape = (max_batch_size, max_seqlen, num_heads)
        self.head_dims = (head_dim_k, head_dim_v)
        self.dtype = dtype
        self.sequences: OrderedDict[int, int] = OrderedDict()
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reset(self) -> None:
        """Forgets all sequences; the memory stays."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int, device: torch.device | None = None) -> None:
        """Memory for one layer, on ``device`` or torch's default device."""
        self.cache[layer_number] = tuple(
            torch.zeros(*self.shape, head_dim, dtype=self.dtype, device=device) for head_dim in self.head_dims
        )


class InferenceParams:
    """A KV cache for ``forward(..., inference_params=...)``.

    Args:
        max_batch_size, max_sequence_length: room.
        num_heads_kv, head_dim_k: K, H.
        dtype: of the cache.
        head_dim_v: None: ``head_dim_k``.
        max_ctx_len: longest prompt, in tokens; TE asks for it with thd.
        qkv_format: of the new tokens, bshd or thd.

    Raises:
        ValueError: ``max_ctx_len`` is missing or out of range; an unknown format.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
    ):
        _require(qkv_format in ("bshd", "thd"), f"qkv_format={qkv_format!r}: te_reference has bshd and thd.")
        if qkv_format == "thd":
            _require(
                max_ctx_len is not None and 1 <= max_ctx_len <= max_sequence_length,
                f"max_ctx_len={max_ctx_len} must be between 1 and max_sequence_length={max_sequence_length} with "
                "qkv_format=thd.",
            )
            self.max_ctx_len = max_ctx_len
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.is_paged = False
        self.cache_manager = KVCacheManager(
            max_batch_size, max_sequence_length, num_heads_kv, head_dim_k, dtype, head_dim_v or head_dim_k
        )
        self.reset()

    def reset(self) -> None:
        """Forgets all sequences; the memory stays."""
        self.cache_manager.reset()
        self.new_lengths: list[int] = []
        self.old_lengths: list[int] = []
        self._shared: dict[tuple[str, torch.device], Any] = {}

    @property
    def sequences(self) -> OrderedDict[int, int]:
        """Tokens of every sequence, the current step's included."""
        return self.cache_manager.sequences

    def allocate_memory(self, layer_number: int) -> None:
        """Memory for one layer; attention does it on first use otherwise."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: "OrderedDict[int, int]") -> None:
        """Begins a step of ``{sequence id: number of new tokens}``; sequences that are not named are dropped.

        Raises:
            ValueError: no room, a known sequence with other than one token, or sequences out of order.
        """
        old = self.sequences
        kept = [sequence for sequence in old if sequence in step_dict]
        order = list(step_dict)
        _require(
            order[: len(kept)] == kept,
            f"pre_step: sequences {order} must begin with those in the cache, {kept}, in this order.",
        )
        for sequence in kept:
            _require(
                step_dict[sequence] == 1,
                f"pre_step: sequence {sequence} has {old[sequence]} tokens in the cache and can only advance by 1, not "
                f"{step_dict[sequence]}.",
            )
        sequences = OrderedDict((sequence, old.get(sequence, 0) + count) for sequence, count in step_dict.items())
        _require(
            len(sequences) <= self.max_batch_size,
            f"{len(sequences)} sequences exceed max_batch_size={self.max_batch_size} of InferenceParams.",
        )
        longest = max(sequences.values())
        _require(
            longest <= self.max_sequence_length,
            f"a sequence of {longest} tokens exceeds max_sequence_length={self.max_sequence_length} of "
            "InferenceParams: allocate prompt plus new tokens.",
        )
        if len(kept) < len(old):
            rows = [index for index, sequence in enumerate(old) if sequence in step_dict]
            for layer in self.cache_manager.cache.values():
                for tensor in layer:
                    tensor[: len(rows)] = tensor[rows]
        self.cache_manager.sequences = sequences
        self.new_lengths = list(step_dict.values())
        self.old_lengths = [sequences[sequence] - count for sequence, count in step_dict.items()]
        self._shared.clear()

    @property
    def decoding(self) -> bool:
        """Whether every sequence gets one token in this step."""
        return all(count == 1 for count in self.new_lengths)

    @property
    def aligned(self) -> bool:
        """Whether all sequences had the same number of tokens before this step."""
        return min(self.old_lengths) == max(self.old_lengths)

    def rotation(self, angles_SH2: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [..., 1, 1, H/2] for the new tokens' hidden states [T, D] or [B, S, D]."""

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            starts_B = torch.tensor(self.old_lengths, device=hidden.device)
            if hidden.ndim == 3:
                positions = starts_B[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
            else:
                counts_B = torch.tensor(self.new_lengths, device=hidden.device)
                first_B = counts_B.cumsum(0) - counts_B
                positions = torch.arange(len(hidden), device=hidden.device) + (starts_B - first_B).repeat_interleave(
                    counts_B
                )
            # Padding on the right of a row may lie beyond the table.
            angles = angles_SH2[positions.clamp_(max=len(angles_SH2) - 1)][..., None, None, :]
            return angles.cos(), angles.sin()

        return self._once("rotation", hidden.device, compute)

    def step(self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a layer's new keys and values, [T, K, H] or [B, S, K, H] with the real tokens first in each row.

        Returns:
            All keys and values of the step's sequences, [B, longest, K, H]; what lies beyond a sequence's length is
            undefined.
        """
        manager = self.cache_manager
        if layer_number not in manager.cache:
            manager.allocate_memory(layer_number, new_k.device)
        elif manager.cache[layer_number][0].device != new_k.device:  # allocated before the model's device was known
            manager.cache[layer_number] = tuple(tensor.to(new_k.device) for tensor in manager.cache[layer_number])
        batch_size, longest = len(self.new_lengths), max(self.sequences.values())
        for tensor, new in zip(manager.cache[layer_number], (new_k, new_v), strict=True):
            if self.decoding and self.aligned:
                tensor[:batch_size, self.old_lengths[0]] = new.view(batch_size, *new.shape[-2:])
            elif self.decoding:
                tensor[self._places(new.device)] = new.view(batch_size, *new.shape[-2:])
            else:
                rows = new.split(self.new_lengths) if new.ndim == 3 else new
                for row, (start, count) in enumerate(zip(self.old_lengths, self.new_lengths, strict=True)):
                    tensor[row, start : start + count] = rows[row][:count]
        keys, values = manager.cache[layer_number]
        return keys[:batch_size, :longest], values[:batch_size, :longest]

    def visible(self, device: torch.device) -> torch.Tensor | None:
        """Decoding: which cached tokens each sequence may attend to, bool [B, 1, 1, longest]; None: all."""
        if self.aligned:
            return None

        def compute() -> torch.Tensor:
            lengths_B = torch.tensor(list(self.sequences.values()), device=device)
            return (torch.arange(max(self.sequences.values()), device=device) < lengths_B[:, None])[:, None, None]

        return self._once("visible", device, compute)

    def _places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoding: row and column of every sequence's new token in the cache, int64 [B] each."""

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            return torch.arange(len(self.old_lengths), device=device), torch.tensor(self.old_lengths, device=device)

        return self._once("places", device, compute)

    def _once(self, name: str, device: torch.device, compute: Callable[[], Any]) -> Any:
        """What all layers of a step share, computed by the first."""
        key = (name, device)
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]
