"""TransformerEngine's PyTorch surface, as far as the models use it, in plain PyTorch.

Same names, signatures, parameter names, layouts and rounding points as TransformerEngine 2.20
(``transformer_engine.pytorch``), so that a state dict or a config value moves between the two untouched; runs on a CPU
or any other torch device. Arguments that the recipe never uses are not accepted: a call that this package cannot
honour fails instead of being ignored.
"""

from te_reference import ops, optimizers, router
from te_reference.attention import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding
from te_reference.context import autocast, checkpoint, quantized_model_init
from te_reference.inference import InferenceParams
from te_reference.modules import LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from te_reference.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_unpermute,
)
from te_reference.transformer import TransformerLayer


__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_unpermute",
    "ops",
    "optimizers",
    "quantized_model_init",
    "router",
]
