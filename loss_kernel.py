"""The softmax gradient of loss.py as one Triton kernel, for CUDA tensors.

Legend: c tokens of one chunk, V vocabulary.

One program per row reads its logits twice, the second time mostly from the L2 cache, and writes the gradient over them:
first pass maximum and sum of exponentials (online), second pass (p - onehot) * scale. All arithmetic in FP32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax_gradient_kernel(
    logits_ptr, row_stride, targets_ptr, scale_ptr, losses_ptr, num_columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row)
    columns = tl.arange(0, BLOCK)

    if target < 0:  # ignored: no loss, no gradient
        zeros = tl.zeros([BLOCK], dtype=logits_ptr.dtype.element_ty)
        for start in range(0, num_columns, BLOCK):
            tl.store(row_ptr + start + columns, zeros, mask=start + columns < num_columns)
        tl.store(losses_ptr + row, 0.0)
        return

    # Read before the reductions below, whose barriers keep every warp from overwriting it too early.
    target_logit = tl.load(row_ptr + target).to(tl.float32)
    scale = tl.load(scale_ptr)
    maxima = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        z = tl.load(row_ptr + start + columns, mask=start + columns < num_columns, other=-float("inf")).to(tl.float32)
        new_maxima = tl.maximum(maxima, z)
        # A lane whose columns all lie beyond the row stays at -inf; exp(-inf - -inf) would be NaN.
        finite = tl.where(new_maxima == -float("inf"), 0.0, new_maxima)
        sums = sums * tl.exp(maxima - finite) + tl.exp(z - finite)
        maxima = new_maxima
    maximum = tl.max(maxima, axis=0)
    log_sum = maximum + tl.log(tl.sum(sums * tl.exp(maxima - maximum), axis=0))
    tl.store(losses_ptr + row, (log_sum - target_logit) * scale)

    for start in range(0, num_columns, BLOCK):
        mask = start + columns < num_columns
        p = tl.exp(tl.load(row_ptr + start + columns, mask=mask, other=-float("inf")).to(tl.float32) - log_sum)
        # p - 1 in FP32, not from the rounded p: in BF16 the gradient of a target with p > 0.998 would vanish.
        gradient = tl.where(start + columns == target, p - 1.0, p) * scale
        tl.store(row_ptr + start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=mask)


def softmax_gradient_(logits_cV: torch.Tensor, targets_c: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As ``loss.softmax_gradient_``, on a CUDA device."""
    losses_c = torch.empty(logits_cV.shape[0], device=logits_cV.device, dtype=torch.float32)
    _softmax_gradient_kernel[(logits_cV.shape[0],)](
        logits_cV, logits_cV.stride(0), targets_c, scale, losses_c, logits_cV.shape[1], BLOCK=8192, num_warps=16
    )
    return losses_c.sum()


@triton.jit
def _scaled_cast_kernel(source_ptr, scale_ptr, target_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    scaled = tl.load(source_ptr + offsets, mask=mask) * tl.load(scale_ptr)
    tl.store(target_ptr + offsets, scaled.to(target_ptr.dtype.element_ty), mask=mask)


def scaled_cast(source: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(source * scale) rounded once to ``dtype``; ``source`` FP32 and contiguous, ``scale`` an FP32 scalar."""
    target = torch.empty_like(source, dtype=dtype)
    _scaled_cast_kernel[(triton.cdiv(source.numel(), 4096),)](
        source, scale, target, source.numel(), BLOCK=4096, num_warps=8
    )
    return target
