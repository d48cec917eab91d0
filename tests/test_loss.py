"""Chunked linear cross entropy against torch's cross entropy on whole logits, and its peak memory."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import loss
from loss import IGNORE_INDEX, linear_cross_entropy, softmax_gradient_


def make_inputs(tokens=37, width=16, vocabulary=50, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[::5] = IGNORE_INDEX
    return hidden, weight, targets


@pytest.mark.parametrize("logits_per_chunk", [1, 50 * 7, 2**20])
def test_loss_and_gradients_equal_torch(monkeypatch, logits_per_chunk):
    monkeypatch.setitem(loss.LOGITS_PER_CHUNK, "cpu", logits_per_chunk)
    hidden, weight, targets = make_inputs()
    expected = F.cross_entropy(hidden @ weight.t(), targets, ignore_index=IGNORE_INDEX)
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    actual = linear_cross_entropy(hidden, weight, targets)
    actual_grads = torch.autograd.grad(actual, (hidden, weight))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)


def test_normalised_by_the_global_count():
    """Pitfall 12: four uneven micro-batches with the global count add up to one big batch; a mean of means would
    not."""
    hidden, weight, targets = make_inputs(tokens=40)
    count = (targets != IGNORE_INDEX).sum()
    whole = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, count), (hidden, weight))
    total = torch.zeros_like(weight)
    loss_sum = 0.0
    for start, end in [(0, 1), (1, 4), (4, 25), (25, 40)]:
        part = linear_cross_entropy(hidden[start:end], weight, targets[start:end], count)
        loss_sum += part.item()
        total += torch.autograd.grad(part, weight)[0]
    torch.testing.assert_close(total, whole[1], rtol=1e-5, atol=1e-6)
    assert loss_sum == pytest.approx(F.cross_entropy(hidden @ weight.t(), targets).item(), rel=1e-6)


def test_gradient_scales_with_the_upstream_gradient():
    hidden, weight, targets = make_inputs()
    once = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), weight)[0]
    thrice = torch.autograd.grad(3 * linear_cross_entropy(hidden, weight, targets), weight)[0]
    torch.testing.assert_close(thrice, 3 * once)


def test_all_targets_ignored_is_zero_with_zero_gradients():
    hidden, weight, targets = make_inputs()
    value = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE_INDEX))
    assert value.item() == 0.0
    for grad in torch.autograd.grad(value, (hidden, weight)):
        assert grad.abs().max() == 0


def test_bf16_gradient_of_a_confident_target_does_not_vanish():
    """p = 0.9995 rounds to 1 in BF16; p - 1 must not become 0. The expected value is the FP64 formula."""
    logits = torch.zeros(1, 4, dtype=torch.bfloat16)
    logits[0, 2] = 9.0
    gradient = logits.clone()
    softmax_gradient_(gradient, torch.tensor([2]), torch.ones(()))
    expected = logits.double().softmax(1)[0, 2] - 1
    assert gradient[0, 2].item() == pytest.approx(expected.item(), rel=1e-2)
    assert gradient[0, 2] != 0


def test_bf16_weight_gradient_is_summed_in_fp32(monkeypatch):
    """512 chunks of one token each: summing BF16 products in BF16 would lose the small ones."""
    monkeypatch.setitem(loss.LOGITS_PER_CHUNK, "cpu", 1)
    hidden, weight, targets = make_inputs(tokens=512, dtype=torch.bfloat16)
    expected = torch.autograd.grad(
        F.cross_entropy(hidden.float() @ weight.float().t(), targets, ignore_index=IGNORE_INDEX), weight
    )[0]
    actual = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), weight)[0]
    assert (actual.float() - expected.float()).norm() / expected.float().norm() < 1e-2


PEAK_SCRIPT = """
    import resource, torch
    from loss import linear_cross_entropy
    torch.set_num_threads(1)
    hidden = torch.randn(16384, 8, requires_grad=True)
    weight = torch.randn({vocabulary}, 8, requires_grad=True)
    linear_cross_entropy(hidden[:64], weight, torch.zeros(64, dtype=torch.int64)).backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    linear_cross_entropy(hidden, weight, torch.randint({vocabulary}, (16384,))).backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_peak_memory_does_not_grow_with_the_vocabulary():
    """16,384 tokens: whole FP32 logits would take 0.5 GiB at 8k and 8 GiB at 128k vocabulary."""
    peaks_mib = {}
    for vocabulary in (8_192, 131_072):
        script = textwrap.dedent(PEAK_SCRIPT.format(vocabulary=vocabulary))
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        peaks_mib[vocabulary] = int(result.stdout) / 1024
    assert peaks_mib[131_072] - peaks_mib[8_192] < 64, peaks_mib  # whole logits would differ by 7,680
    assert peaks_mib[131_072] < 128, peaks_mib


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [5, 8192, 128_256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_equals_plain_torch(vocabulary, dtype):
    logits = (3 * torch.randn(64, vocabulary)).to(dtype)
    targets = torch.randint(vocabulary, (64,))
    targets[::7] = IGNORE_INDEX
    logits[3, targets[3]] = 60.0
    gradient, on_gpu = logits.clone(), logits.cuda()
    expected = softmax_gradient_(gradient, targets, torch.tensor(0.5))
    actual = softmax_gradient_(on_gpu, targets.cuda(), torch.tensor(0.5, device="cuda"))
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    tolerance = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-7}
    torch.testing.assert_close(on_gpu.cpu(), gradient, **tolerance)
