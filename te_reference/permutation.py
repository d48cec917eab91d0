"""Token permutation for mixtures of experts: TransformerEngine's ``moe_permute*`` and ``moe_unpermute``, mask maps.

Legend: T tokens, D model width, E groups (experts, or ranks), R rows of the permuted buffer.

The routing map [T, E] says which groups each token goes to. The permuted buffer holds one row per (token, group) pair,
group after group, tokens in order inside a group; unpermuting sums the rows of each token. In the padded form every
group's rows are followed by rows of zeros up to a multiple of ``align_size``.
``row_id_map`` is opaque, as in TE: here int64 [2, pairs], the token of each pair and its row in the buffer.
Source: transformer_engine/pytorch/permutation.py.
"""

import torch

from te_reference.modules import _require


def _pairs(routing_map_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(group, token) of every pair, sorted: int64 [pairs] each."""
    return routing_map_TE.t().nonzero(as_tuple=True)


def moe_permute(
    inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int, map_type: str = "mask"
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, D] -> (rows [R, D], row_id_map); R = ``num_out_tokens`` must be the number of pairs."""
    _require(map_type == "mask", f"map_type={map_type!r}: te_reference has mask only.")
    _, token_R = _pairs(routing_map)
    _require(len(token_R) == num_out_tokens, f"num_out_tokens={num_out_tokens}, but the map has {len(token_R)} pairs.")
    return inp.index_select(0, token_R), torch.stack((token_R, torch.arange(len(token_R), device=inp.device)))


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, D], weights [T, E] -> (rows [R, D], weight of each row [R], row_id_map)."""
    group_R, token_R = _pairs(routing_map)
    _require(len(token_R) == num_out_tokens, f"num_out_tokens={num_out_tokens}, but the map has {len(token_R)} pairs.")
    row_id_map = torch.stack((token_R, torch.arange(len(token_R), device=inp.device)))
    return inp.index_select(0, token_R), probs[token_R, group_R], row_id_map


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """As :func:`moe_permute_with_probs`, every group padded with zero rows to a multiple of ``align_size``.

    Returns:
        rows [R, D], weights [R], row_id_map, pad_offsets [E] (None: nothing was padded), rows per group [E] int64.
    """
    _require(align_size > 0, f"align_size={align_size} must be positive.")
    counts_E = tokens_per_expert.long()
    padded_E = (counts_E + align_size - 1) // align_size * align_size
    padding_E = padded_E - counts_E
    group_R, token_R = _pairs(routing_map)
    row_R = torch.arange(len(token_R), device=inp.device)
    pad_offsets_E = None
    if bool(padding_E.any()):
        pad_offsets_E = padding_E.cumsum(0) - padding_E
        row_R = row_R + pad_offsets_E[group_R]
    num_rows = int(padded_E.sum())
    rows = inp.new_zeros(num_rows, inp.shape[1]).index_copy_(0, row_R, inp.index_select(0, token_R))
    weights = probs.new_zeros(num_rows).index_copy_(0, row_R, probs[token_R, group_R])
    return rows, weights, torch.stack((token_R, row_R)), pad_offsets_E, padded_E


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [R, D] -> [T, D]: the sum of each token's rows, added up in FP32 and rounded once."""
    _require(map_type == "mask", f"map_type={map_type!r}: te_reference has mask only.")
    token_R, row_R = row_id_map
    rows = inp if pad_offsets is None else inp.index_select(0, row_R)
    summed_TD = rows.new_zeros(restore_shape or inp.shape, dtype=torch.float32).index_add_(0, token_R, rows.float())
    return summed_TD.to(inp.dtype)
