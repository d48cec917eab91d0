"""Exact causal attention over sequences that a group of ranks shares: KV blocks travel around a ring.

Legend: B batch, S sequence, T packed tokens, N query heads, K KV heads, R = N / K, H head dim; C context-parallel size;
t this rank's tokens, n query rows and m keys of one block.

Layout (zigzag). Every sequence, padded to a multiple of 2C, is cut into 2C chunks; rank r holds chunks r and 2C-1-r, so
that all ranks see the same number of (query, key) pairs under the causal mask. C = 2, eight tokens: rank 0 has
[0 1 6 7], rank 1 has [2 3 4 5].

Forward. The ranks pass their keys and values on, C-1 times. A query chunk i attends a key chunk j if j <= i, under the
causal mask if j = i. With s = q k^T / sqrt(H), each block gives l = logsumexp(s) and o = softmax(s) v, and two of them
merge exactly: L = log(e^l1 + e^l2), O = e^(l1-L) o1 + e^(l2-L) o2 (the online softmax of FlashAttention, arXiv
2205.14135; over ranks: Ring Attention, arXiv 2310.01889). Saved for the backward pass: q, one KV block, O and L.

Backward. P = e^(s-L) is computed again block by block; with d = rowsum(dO * O): dV += P^T dO, dS = P * (dO V^T - d),
dQ += dS K / sqrt(H), dK += dS^T Q / sqrt(H). A rank ends the forward pass with the KV block of its successor; from
there the blocks travel back, followed by their gradients, and both reach their owner with the last of C-1 moves.

Sums and softmax are FP32 (FP64 for FP64 inputs), and so are the gradients that travel. Scores exist for one block of
bounded size at a time, so memory per rank is proportional to t.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from phases import phase


SCORES_PER_BLOCK = 2**22
"""Scores computed at a time: 16 MiB in FP32."""

Document = tuple[int, int, int]
"""A sequence on this rank: first local token, tokens per chunk (two of them), real length of the whole sequence."""


def zigzag_indices(offsets: torch.Tensor, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Where the tokens of a rank lie in the whole buffer.

    Args:
        offsets: int [sequences + 1], where the sequences begin in the whole buffer; the last one is its length.
        cp_rank, cp_size: place in the context-parallel group.

    Returns:
        int64 [T / cp_size]; chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank`` of each sequence, in order.

    Raises:
        ValueError: a sequence that does not divide into 2 * cp_size chunks.
    """
    offsets = offsets.long()
    lengths = offsets.diff()
    if (lengths % (2 * cp_size)).any():
        raise ValueError(
            f"sequences of {lengths.tolist()} tokens: context parallelism over {cp_size} ranks needs each padded to a "
            f"multiple of {2 * cp_size}."
        )
    tokens_t = torch.arange(int(offsets[-1]) // cp_size, device=offsets.device)
    starts = offsets // cp_size
    sequence_t = torch.bucketize(tokens_t, starts[1:], right=True)
    chunk_t = (lengths // (2 * cp_size))[sequence_t]
    local_t = tokens_t - starts[sequence_t]
    second_t = local_t >= chunk_t
    return offsets[sequence_t] + local_t + chunk_t * torch.where(second_t, 2 * (cp_size - 1) - cp_rank, cp_rank)


class Ring:
    """The ranks of a context-parallel group in a circle; tensors move to the successor or back."""

    def __init__(self, cp_group: dist.ProcessGroup | list[dist.ProcessGroup], cp_global_ranks: list[int]):
        """
        Args:
            cp_group: the group, or TE's pair of them for ``a2a+p2p``; neighbours may share no group of a pair, so
                messages then go through the default group.
            cp_global_ranks: global ranks of the whole group, in the order of the chunks.
        """
        self._group = None if isinstance(cp_group, list) else cp_group
        self._ranks = list(cp_global_ranks)
        self.size = len(self._ranks)
        self.rank = self._ranks.index(dist.get_rank())

    def move(self, block: torch.Tensor, direction: int) -> "Moving":
        """Starts sending ``block`` to the successor (1) or the predecessor (-1) and receiving the other neighbour's."""
        received = torch.empty_like(block)
        to, source = (self._ranks[(self.rank + step) % self.size] for step in (direction, -direction))
        moves = [
            dist.P2POp(dist.isend, block, to, group=self._group),
            dist.P2POp(dist.irecv, received, source, group=self._group),
        ]
        with phase("CP exchange"):
            works = dist.batch_isend_irecv(moves)
        return Moving(block, received, works)


class Moving:
    """A move that is under way; keeps what is being sent alive."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, works: list[dist.Work]):
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> torch.Tensor:
        """The block that came in."""
        with phase("CP exchange"):
            for work in self._works:
                work.wait()
        return self._received


def ring_attention(
    q_BtNH: torch.Tensor,
    k_BtKH: torch.Tensor,
    v_BtKH: torch.Tensor,
    documents: list[Document],
    ring: Ring,
    scale: float,
) -> torch.Tensor:
    """This rank's rows of softmax(scale * q k^T) v under the causal mask of each document: [B, t, N, H].

    Rows of padding come back as zeros and give no gradient. Every rank of the ring calls it with the same documents.
    """
    return _RingAttention.apply(q_BtNH, k_BtKH, v_BtKH, documents, ring, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BtNH, k_BtKH, v_BtKH, documents, ring, scale):
        q = q_BtNH.unflatten(2, (k_BtKH.shape[2], -1))  # [B, t, K, R, H]
        out = torch.zeros(q.shape, dtype=_sum_dtype(q), device=q.device)
        lse = torch.full(out.shape[:-1], -torch.inf, dtype=out.dtype, device=q.device)  # [B, t, K, R]
        kv = torch.stack((k_BtKH, v_BtKH))
        for step in range(ring.size):
            moving = ring.move(kv, 1) if step < ring.size - 1 else None
            for rows, keys, masked_nm in _blocks(documents, ring, (ring.rank - step) % ring.size, q):
                _merge_block(out[:, rows], lse[:, rows], q[:, rows], kv[0, :, keys], kv[1, :, keys], masked_nm, scale)
            if moving is not None:
                kv = moving.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.arguments = documents, ring, scale
        return out.flatten(2, 3)

    @staticmethod
    def backward(ctx, grad_out_BtNH):
        q, kv, out, lse = ctx.saved_tensors
        documents, ring, scale = ctx.arguments
        grad_out = grad_out_BtNH.reshape(q.shape)
        delta = (grad_out.to(lse.dtype) * out).sum(-1)  # [B, t, K, R]
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        coming = None
        for step in range(ring.size):
            moving = ring.move(kv, -1) if step < ring.size - 1 else None
            grad_kv = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)
            for rows, keys, masked_nm in _blocks(documents, ring, (ring.rank + 1 + step) % ring.size, q):
                _add_block_gradients(
                    (grad_q[:, rows], grad_kv[0, :, keys], grad_kv[1, :, keys]),
                    (q[:, rows], kv[0, :, keys], kv[1, :, keys]),
                    (grad_out[:, rows], lse[:, rows], delta[:, rows]),
                    masked_nm,
                    scale,
                )
            if coming is not None:
                grad_kv += coming.wait()
            if moving is not None:
                kv, coming = moving.wait(), ring.move(grad_kv, -1)
        grad_k, grad_v = grad_kv.to(q.dtype)
        return grad_q.to(q.dtype).flatten(2, 3), grad_k, grad_v, None, None, None


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _blocks(
    documents: list[Document], ring: Ring, source: int, q: torch.Tensor
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Local query rows, key rows of rank ``source``, and what the causal mask hides, bool [n, m]; None = nothing."""
    heads = q.shape[0] * q.shape[2] * q.shape[3]  # B * N
    for start, chunk, length in documents:
        for query_number, query in _chunks(start, chunk, length, ring.rank, ring.size):
            for key_number, key in _chunks(start, chunk, length, source, ring.size):
                if key_number > query_number or query.start == query.stop:
                    continue
                rows = max(1, SCORES_PER_BLOCK // (heads * (key.stop - key.start)))
                for first in range(query.start, query.stop, rows):
                    last = min(first + rows, query.stop)
                    if key_number < query_number:
                        yield slice(first, last), key, None
                        continue
                    seen = last - query.start
                    masked_nm = torch.ones(last - first, seen, dtype=torch.bool, device=q.device)
                    masked_nm.triu_(first - query.start + 1)
                    yield slice(first, last), slice(key.start, key.start + seen), masked_nm


def _chunks(start: int, chunk: int, length: int, rank: int, size: int) -> Iterator[tuple[int, slice]]:
    """Number and real tokens of a rank's two chunks of a document."""
    for half, number in enumerate((rank, 2 * size - 1 - rank)):
        real = min(max(length - number * chunk, 0), chunk)
        yield number, slice(start + half * chunk, start + half * chunk + real)


def _scores(q: torch.Tensor, k: torch.Tensor, masked_nm: torch.Tensor | None, scale: float) -> torch.Tensor:
    """[B, n, K, R, H], [B, m, K, H] -> [B, K, R, n, m]."""
    scores = torch.einsum("bnkrh,bmkh->bkrnm", q, k).mul_(scale)
    return scores if masked_nm is None else scores.masked_fill_(masked_nm, -torch.inf)


def _merge_block(out, lse, q, k, v, masked_nm, scale) -> None:
    """Merges one block into ``out`` [B, n, K, R, H] and ``lse`` [B, n, K, R], in place."""
    q, k, v = (x.to(lse.dtype) for x in (q, k, v))
    scores = _scores(q, k, masked_nm, scale)
    block_lse = scores.logsumexp(-1)  # [B, K, R, n]
    block_out = torch.einsum("bkrnm,bmkh->bnkrh", scores.sub_(block_lse.unsqueeze(-1)).exp_(), v)
    block_lse = block_lse.permute(0, 3, 1, 2)
    merged = torch.logaddexp(lse, block_lse)
    out.mul_((lse - merged).exp_().unsqueeze(-1)).add_(block_out.mul_((block_lse - merged).exp_().unsqueeze(-1)))
    lse.copy_(merged)


def _add_block_gradients(grads, inputs, rows, masked_nm, scale) -> None:
    """Adds one block's part of the gradients of q, k, v, in place."""
    grad_q, grad_k, grad_v = grads
    grad_out, lse, delta = rows
    q, k, v, grad_out = (x.to(lse.dtype) for x in (*inputs, grad_out))
    lse, delta = (x.permute(0, 2, 3, 1).unsqueeze(-1) for x in (lse, delta))  # [B, K, R, n, 1]
    p = _scores(q, k, masked_nm, scale).sub_(lse).exp_()
    grad_v += torch.einsum("bkrnm,bnkrh->bmkh", p, grad_out)
    grad_scores = torch.einsum("bnkrh,bmkh->bkrnm", grad_out, v).sub_(delta).mul_(p).mul_(scale)
    grad_q += torch.einsum("bkrnm,bmkh->bnkrh", grad_scores, k)
    grad_k += torch.einsum("bkrnm,bnkrh->bmkh", grad_scores, q)
