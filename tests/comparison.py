"""How far tensors are apart, for tests."""

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|, L2 norms in FP32."""
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
