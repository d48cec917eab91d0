"""Cross entropy of a linear head, chunk by chunk: the logits never exist whole.

Legend: T tokens, D model width, V vocabulary; c tokens of one chunk.

With h [T, D], W [V, D] and targets t [T], z = h W^T and p = softmax(z), the loss is L = (1/n) sum_t (logsumexp(z_t) -
z_t[t_t]) over the valid targets, where n is the number of valid targets of the *global* batch: all micro-batches of
all ranks of one optimiser step. Its gradient needs p only one chunk at a time: dz = (p - onehot) / n, dh = dz W, dW =
dz^T h. So the forward pass computes loss and gradients together and drops each chunk's logits; the backward pass only
scales. Three matrix products in all, nothing recomputed. dW is accumulated in FP32 over the chunks and rounded once.
(The scheme of "Cut Your Losses in Large-Vocabulary Language Models", Wijmans et al. 2024, and Liger-Kernel, Hsu et al.
2024.)
"""

import torch

from phases import phase


IGNORE_INDEX = -100

# Logits held at a time. On a GPU large enough to keep the tensor cores busy at any vocabulary (0.5 GiB in BF16);
# on a CPU small enough to stay near the caches.
LOGITS_PER_CHUNK = {"cuda": 2**28, "cpu": 2**21}


def softmax_gradient_(logits_cV: torch.Tensor, targets_c: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Cross entropy of one chunk; the logits are replaced by its gradient with respect to them. FP32 inside.

    Args:
        logits_cV: any float dtype; overwritten.
        targets_c: int64, ``IGNORE_INDEX`` for none.
        scale: FP32 scalar, multiplies loss and gradient (1 / number of valid targets of the global batch).

    Returns:
        The scaled sum of the losses: FP32 scalar.
    """
    if logits_cV.is_cuda:
        from loss_kernel import softmax_gradient_ as kernel  # Triton comes with torch's CUDA builds only

        return kernel(logits_cV, targets_c, scale)
    target_c1 = targets_c.unsqueeze(1).clamp(min=0)
    scale_c1 = torch.where(targets_c.unsqueeze(1) != IGNORE_INDEX, scale, 0.0)
    log_p_cV = logits_cV.log_softmax(dim=1, dtype=torch.float32)  # one pass over memory; on a CPU logsumexp takes four
    log_p_c1 = log_p_cV.gather(1, target_c1)
    logits_cV.copy_(log_p_cV.exp_().mul_(scale_c1))
    # p - 1 in FP32, not from the rounded p: in BF16 the gradient of a target with p > 0.998 would vanish.
    logits_cV.scatter_(1, target_c1, (log_p_c1.expm1() * scale_c1).to(logits_cV.dtype))
    return -(log_p_c1 * scale_c1).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, num_items, with_gradient):
        num_tokens, vocabulary = hidden_TD.shape[0], weight_VD.shape[0]
        per_chunk = LOGITS_PER_CHUNK.get(hidden_TD.device.type, LOGITS_PER_CHUNK["cuda"])
        num_chunks = -(-num_tokens * vocabulary // per_chunk)
        chunk_tokens = -(-num_tokens // num_chunks)  # chunks of one size,
        if chunk_tokens > 1024:
            chunk_tokens = -(-chunk_tokens // 128) * 128  # in whole tiles of a matrix product
        scale = torch.as_tensor(num_items, device=hidden_TD.device, dtype=torch.float32).reciprocal()
        loss = torch.zeros((), device=hidden_TD.device, dtype=torch.float32)
        grad_hidden_TD = torch.empty_like(hidden_TD) if with_gradient else None
        grad_weight_VD = torch.empty_like(weight_VD, dtype=torch.float32) if with_gradient else None
        chunks = zip(
            hidden_TD.split(chunk_tokens),
            targets_T.split(chunk_tokens),
            grad_hidden_TD.split(chunk_tokens) if with_gradient else [None] * num_tokens,
            strict=False,
        )
        for index, (hidden_cD, targets_c, grad_cD) in enumerate(chunks):
            logits_cV = hidden_cD @ weight_VD.t()
            loss += softmax_gradient_(logits_cV, targets_c, scale)
            if with_gradient:
                torch.mm(logits_cV, weight_VD, out=grad_cD)
                _add_product(grad_weight_VD, logits_cV, hidden_cD, beta=min(index, 1))
        if with_gradient:
            ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
            ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        grad_weight = _scaled_cast(grad_weight_VD, grad_loss, ctx.weight_dtype)
        return grad_hidden_TD * grad_loss.to(grad_hidden_TD.dtype), grad_weight, None, None, None


def _scaled_cast(source: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(source * scale) rounded once to ``dtype``."""
    if source.is_cuda:
        from loss_kernel import scaled_cast  # torch's own mixed-dtype product runs at a third of the bandwidth

        return scaled_cast(source, scale, dtype)
    return torch.mul(source, scale, out=torch.empty_like(source, dtype=dtype))


def _add_product(total_VD: torch.Tensor, dz_cV: torch.Tensor, hidden_cD: torch.Tensor, beta: int) -> None:
    """total = beta total + dz^T h with an FP32 sum; with beta = 0 whatever ``total`` was."""
    if total_VD.is_cuda and total_VD.dtype != dz_cV.dtype:
        torch.addmm(total_VD, dz_cV.t(), hidden_cD, out_dtype=torch.float32, beta=beta, out=total_VD)
    else:
        total_VD.addmm_(dz_cV.t().to(total_VD.dtype), hidden_cD.to(total_VD.dtype), beta=beta)


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    shift_labels_T: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Sum of -log p over the valid targets, divided by ``num_items_in_batch``.

    Args:
        hidden_TD: final hidden states, one row per target.
        weight_VD: the LM head, same dtype.
        shift_labels_T: int64 targets, already shifted; -100 = none.
        num_items_in_batch: number of valid targets of the whole global batch; None: of this call.

    Returns:
        FP32 scalar; nats per target.
    """
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels_T != IGNORE_INDEX).sum().clamp_(min=1)
    with_gradient = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    with phase("loss"):
        return _LinearCrossEntropy.apply(hidden_TD, weight_VD, shift_labels_T, num_items_in_batch, with_gradient)
