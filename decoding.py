"""One more token of every sequence, with shapes and addresses that do not change: what a CUDA graph can hold.

The kernels of a single token are shorter than the time that Python takes to launch them, so generation runs at the
host's speed, not the card's. A graph launches a whole step at once. It has no room for decisions: which tokens, how
long the sequences are and where their keys go are tensors, and attention covers a fixed window of the cache under a
mask. The window grows in steps of ``WINDOW_MULTIPLE`` columns, and every new window means a new capture.

Legend: B sequences, W columns of the window, D model width, K KV heads, R query heads per KV head, H head dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


WINDOW_MULTIPLE = 256


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE by halves in FP32, rounded once; ``cos`` and ``sin`` [..., H] broadcast against ``x`` [..., H]."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-x2, x1), dim=-1) * sin).to(x.dtype)


class DecodeStep:
    """Computes the hidden states of one new token per sequence, and adds its keys and values to the cache.

    On a CUDA device the first call runs the step once, which a repetition does not change, captures it, and from then
    on replays it.

    Args:
        model: an ``NVLlamaModel`` whose layers run in the parameters' dtype.
        cache: (keys, values) by layer number, each [at least B, at least W, K, H], keys after RoPE.
        batch_size: B.
        window: W.
    """

    def __init__(
        self, model: nn.Module, cache: dict[int, tuple[torch.Tensor, torch.Tensor]], batch_size: int, window: int
    ):
        device = cache[1][0].device
        self.window = window
        self._model = model
        self._caches = [
            tuple(tensor[:batch_size, :window] for tensor in cache[number]) for number in range(1, len(cache) + 1)
        ]
        self._angles = model.rotary(window, device)[:, 0, 0]  # [at least W, H]
        self._rows_B = torch.arange(batch_size, device=device)
        self._columns_W = torch.arange(window, device=device)
        self._tokens_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._positions_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden_BD: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self, tokens_B: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """int64 [B] -> [B, D] after the final norm.

        Args:
            tokens_B: the new tokens.
            lengths: of the sequences, the new token included; at most W.
        """
        self._tokens_B.copy_(tokens_B)
        self._positions_B.copy_(torch.tensor(lengths) - 1)
        if not tokens_B.is_cuda:
            return self._compute()
        if self._graph is None:
            self._capture()
        self._graph.replay()
        return self._hidden_BD.clone()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # outside the capture: libraries allocate their workspaces on first use
            self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._hidden_BD = self._compute()

    def _compute(self) -> torch.Tensor:
        angles_B1H = self._angles[self._positions_B, None]
        rotation = angles_B1H.cos(), angles_B1H.sin()
        visible_B11W = (self._columns_W <= self._positions_B[:, None])[:, None, None]
        hidden_BD = self._model.embed_tokens(self._tokens_B)
        for layer, cache in zip(self._model.layers, self._caches, strict=True):
            hidden_BD = hidden_BD + self._attention(layer.self_attention, hidden_BD, cache, rotation, visible_B11W)
            hidden_BD = hidden_BD + _output(layer.layernorm_mlp(hidden_BD))
        return self._model.norm(hidden_BD)

    def _attention(self, attention: Any, hidden_BD: torch.Tensor, cache, rotation, visible_B11W) -> torch.Tensor:
        keys_BWKH, values_BWKH = cache
        _, _, num_kv_heads, head_dim = keys_BWKH.shape
        qkv = attention.layernorm_qkv(hidden_BD).view(len(hidden_BD), num_kv_heads, -1, head_dim)  # [B, K, R + 2, H]
        rotated = rotate(qkv[:, :, :-1], *(x[:, None] for x in rotation))  # queries and key
        keys_BWKH[self._rows_B, self._positions_B] = rotated[:, :, -1]
        values_BWKH[self._rows_B, self._positions_B] = qkv[:, :, -1]
        # A KV head's R queries share one position: as R rows of one product, keys need not be repeated.
        context_BKRH = F.scaled_dot_product_attention(
            rotated[:, :, :-1], keys_BWKH.transpose(1, 2), values_BWKH.transpose(1, 2), attn_mask=visible_B11W
        )
        return _output(attention.proj(context_BKRH.flatten(1)))


def _output(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Inside its TransformerLayer, TE builds the last linear layers to return (output, bias); there is no bias here."""
    return result[0] if isinstance(result, tuple) else result
