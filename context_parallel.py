"""Context parallelism: the ranks of a group share every sequence of a batch.

Legend: B batch, S sequence, T packed tokens, N query heads, K KV heads, H head dim; C context-parallel size, t tokens
of one rank (B * S / C or T / C).

Layout. Every sequence is padded to a multiple of 2C tokens and cut into 2C chunks; rank r holds chunks r and 2C-1-r
("zigzag": equal work under the causal mask). Targets are shifted before the split, since the successor of a chunk's
last token may be on another rank. ``cu_seq_lens_*`` and ``max_length_*`` stay those of the whole sequences. World
rank = dp_rank * C + cp_rank, so the ranks of a group are neighbours.

Reading. Every rank of a group builds the same loader (a function of the data-parallel rank alone) and keeps its
chunks: no rank waits for another or runs out before it, and the loader's state is the same on all ranks of a group.
The price is that a group tokenises its data C times, in loader workers that run ahead of the training step. For
131,072 tokens one CPU core took 3 ms (one token per base) or 0.4 s (byte-pair encoding). Reading once and
broadcasting would take 1 ms, and put a collective between every step and its data.

Low precision. A scale of the whole tensor covers the tokens of all ranks that share a sequence, as it does without
context parallelism: delayed scaling reduces its amaxes anyway, current scaling once per quantisation (4 bytes).

Communication of one layer: :func:`bytes_per_layer`.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from collator import Batch
from distributed import DistributedContext
from te_backend import share_current_scales
from te_reference.context_parallel import zigzag_indices


@dataclass(frozen=True)
class ContextParallel:
    """This process's place in the (dp, cp) mesh."""

    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    comm_type: str
    """p2p, all_gather, a2a or a2a+p2p."""
    group: dist.ProcessGroup | list[dist.ProcessGroup] | None
    """The ranks that share a sequence, as TE takes them: [a2a group, p2p group] for a2a+p2p; None for cp_size 1."""
    whole_group: dist.ProcessGroup | None
    """They in one group."""
    global_ranks: list[int]
    """Of the whole context-parallel group, in the order of cp_rank."""

    @property
    def sequence_multiple(self) -> int:
        """What the length of every sequence must be a multiple of, in tokens."""
        return 2 * self.cp_size if self.cp_size > 1 else 1


def init_context_parallel(
    ctx: DistributedContext, cp_size: int, comm_type: str, num_attention_heads: int, num_key_value_heads: int
) -> ContextParallel:
    """Makes the process groups; every rank calls it.

    Args:
        ctx: this process.
        cp_size: ranks per sequence; divides the world size.
        comm_type: p2p, all_gather, a2a or a2a+p2p.
        num_attention_heads, num_key_value_heads: of the model; all-to-all hands out heads.

    Raises:
        ValueError: the heads cannot be handed out as ``comm_type`` needs.
    """
    a2a_size = all_to_all_size(comm_type, cp_size, num_attention_heads, num_key_value_heads, local_world_size())
    dp_size = ctx.world_size // cp_size
    dp_rank, cp_rank = divmod(ctx.rank, cp_size)
    whole_group = None
    if cp_size > 1:
        mesh = init_device_mesh(ctx.device.type, (dp_size, cp_size), mesh_dim_names=("dp", "cp"))
        whole_group = mesh.get_group("cp")
    group: dist.ProcessGroup | list[dist.ProcessGroup] | None = whole_group
    if cp_size > 1 and comm_type == "a2a+p2p":
        shape = (dp_size, cp_size // a2a_size, a2a_size)  # neighbours swap heads, distant ranks pass blocks on
        mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=("dp", "cp_p2p", "cp_a2a"))
        group = [mesh.get_group("cp_a2a"), mesh.get_group("cp_p2p")]
    global_ranks = list(range(dp_rank * cp_size, (dp_rank + 1) * cp_size))
    return ContextParallel(dp_rank, dp_size, cp_rank, cp_size, comm_type, group, whole_group, global_ranks)


def local_world_size() -> int:
    """Processes on this machine, from torchrun's environment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def all_to_all_size(
    comm_type: str, cp_size: int, num_attention_heads: int, num_key_value_heads: int, ranks_per_node: int
) -> int:
    """How many ranks hand their heads around by all-to-all: all of them in a2a, some in a2a+p2p, one (none) otherwise.

    In a2a+p2p it is the largest proper divisor of ``cp_size`` that divides both head counts and the ranks of a node, so
    that all-to-all stays inside a node.

    Raises:
        ValueError: no size fits.
    """
    if cp_size == 1 or comm_type in ("p2p", "all_gather"):
        return 1
    heads = f"num_attention_heads={num_attention_heads} and num_key_value_heads={num_key_value_heads}"
    common_heads = math.gcd(num_attention_heads, num_key_value_heads)
    if comm_type == "a2a":
        if common_heads % cp_size:
            raise ValueError(
                f"cp_comm_type=a2a hands {heads} out over cp_size={cp_size} ranks, which must divide both: use p2p or "
                "all_gather, or a smaller cp_size."
            )
        return cp_size
    if comm_type != "a2a+p2p":
        raise ValueError(f"cp_comm_type={comm_type!r} is not one of p2p, all_gather, a2a, a2a+p2p.")
    fits = math.gcd(cp_size, common_heads, ranks_per_node)
    sizes = [size for size in range(2, cp_size) if fits % size == 0]
    if not sizes:
        raise ValueError(
            f"cp_comm_type=a2a+p2p needs a proper divisor of cp_size={cp_size} above 1 that divides {heads} and the "
            f"{ranks_per_node} processes of a node, and there is none: use p2p or all_gather."
        )
    return sizes[-1]


def set_context_parallel_group(model: nn.Module, cp: ContextParallel, device: torch.device) -> None:
    """Tells every decoder layer, TE's or the reference's, that it holds chunks of sequences. Nothing for cp_size 1."""
    if cp.cp_size == 1:
        return
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # one for all layers, as TE wants it
    for layer in model.model.layers:
        layer.set_context_parallel_group(cp.group, cp.global_ranks, stream, cp.comm_type)
        for module in layer.modules():
            share_current_scales(module, cp.whole_group)


def split_batch(batch: Batch, cp_rank: int, cp_size: int) -> Batch:
    """This rank's two chunks of every sequence of a batch: tensors [B, S] -> [B, S / C], [1, T] -> [1, T / C].

    ``labels`` are left out: what a rank shifted by itself would be wrong at every end of a chunk. BSHD batches get
    ``max_length_q`` = S, because the RoPE table must cover the whole sequence.

    Raises:
        ValueError: a sequence that does not divide into 2C chunks.
    """
    if cp_size == 1:
        return batch
    input_ids = batch["input_ids"]
    if "cu_seq_lens_q" in batch:
        if "cu_seq_lens_q_padded" not in batch:
            raise ValueError("context parallelism needs sequences padded one by one: cu_seq_lens_q_padded is missing.")
        offsets, extra = batch["cu_seq_lens_q_padded"], {}
    else:
        offsets = torch.tensor([0, input_ids.shape[1]])
        extra = {"max_length_q": input_ids.shape[1], "max_length_k": input_ids.shape[1]}
    if offsets[-1] != input_ids.shape[1]:
        raise ValueError(f"the batch has {input_ids.shape[1]} tokens, but its sequences end at {int(offsets[-1])}.")
    indices = zigzag_indices(offsets, cp_rank, cp_size)
    split = {key: batch[key].index_select(1, indices) for key in ("input_ids", "shift_labels", "attention_mask")}
    return {**{key: value for key, value in batch.items() if key != "labels"}, **split, **extra}


class SplitBatches:
    """A loader's batches, each cut down to this rank's chunks; as often as the loader can be iterated."""

    def __init__(self, batches: Iterable[Batch], cp_rank: int, cp_size: int):
        self._batches, self._cp_rank, self._cp_size = batches, cp_rank, cp_size

    def __iter__(self) -> Iterator[Batch]:
        return (split_batch(batch, self._cp_rank, self._cp_size) for batch in self._batches)


def bytes_per_layer(
    comm_type: str,
    num_tokens: int,
    cp_size: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    element_bytes: int = 2,
    a2a_size: int | None = None,
) -> tuple[int, int]:
    """Bytes that one rank sends for the attention of one layer: (forward, backward). It receives as many.

    With t = tokens / C, kv = 2 t K H and qo = 2 t N H elements, and a all-to-all ranks:

    ============ ============================================== =====================================================
    p2p          (C-1) kv: keys and values, C-1 moves            2 (C-1) kv: they and their gradients, C-1 moves
    all_gather   (C-1) kv                                        2 (C-1) kv: gathered again; gradients reduce-scattered
    a2a          (C-1)/C (qo + kv): q, k, v in and output back   the same for their gradients
    a2a+p2p      (a-1)/a (qo + kv) + (C/a-1) kv                  (a-1)/a (qo + kv) + 2 (C/a-1) kv
    ============ ============================================== =====================================================

    p2p overlaps its moves with the products, all_gather holds all keys and values of a layer at once, and a2a does not
    grow with C. Activation checkpointing adds another forward pass. The reference backend's ring is p2p; it sends
    gradients in FP32.

    Args:
        comm_type: p2p, all_gather, a2a or a2a+p2p.
        num_tokens: of the whole micro-batch, padding included: B * S or T.
        cp_size: C.
        num_attention_heads, num_key_value_heads, head_dim: N, K, H.
        element_bytes: of an activation (2 in BF16).
        a2a_size: a, for a2a+p2p; see :func:`all_to_all_size`.

    Raises:
        ValueError: an unknown ``comm_type``, or a missing ``a2a_size``.
    """
    kv_bytes = 2 * num_tokens * num_key_value_heads * head_dim * element_bytes // cp_size
    qo_bytes = 2 * num_tokens * num_attention_heads * head_dim * element_bytes // cp_size
    if comm_type == "a2a+p2p" and not a2a_size:
        raise ValueError("a2a+p2p needs a2a_size, the number of ranks that take part in one all-to-all.")
    sizes = {"p2p": 1, "all_gather": 1, "a2a": cp_size, "a2a+p2p": a2a_size}
    if comm_type not in sizes:
        raise ValueError(f"cp_comm_type={comm_type!r} is not one of {', '.join(sizes)}.")
    a2a_ranks = sizes[comm_type]
    heads_bytes = (qo_bytes + kv_bytes) * (a2a_ranks - 1) // a2a_ranks
    moved_bytes = (cp_size // a2a_ranks - 1) * kv_bytes
    return heads_bytes + moved_bytes, heads_bytes + 2 * moved_bytes
