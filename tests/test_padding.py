"""Batches padded to what a recipe needs: the padding changes neither the loss nor the gradients."""

import pytest
import torch

from collator import IGNORE_INDEX
from dataset import build_train_loader, load_tokenizer
from low_precision import SHAPE
from modeling_llama_te import NVLlamaConfig
from quantization import plan_precision
from test_config import compose_config
from training import build_model
from weight_init import initialize_weights


RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")


def gradients(recipe: str | None, packed: bool, pad_to_multiple: int) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Length, loss and gradients of one batch of the genome; ``pad_to_multiple``: 0: what the recipe needs."""
    prefix = "fp4" if recipe == "NVFP4BlockScaling" else "fp8"
    overrides = ["dataset.num_workers=0", "te_backend=reference"]
    overrides += [f"{prefix}_config.enabled=true", f"{prefix}_config.{prefix}_recipe={recipe}"] if recipe else []
    if recipe == "NVFP4BlockScaling":  # the number of random bits depends on the number of tokens
        overrides.append("+fp4_config.fp4_recipe_kwargs.disable_stochastic_rounding=true")
    # 250 packed tokens, or 5 rows of 50: no multiple of 8.
    overrides += ["use_sequence_packing=true", "dataset.token_micro_batch_size=250"] if packed else []
    overrides += ["dataset.max_seq_length=50", "dataset.micro_batch_size=5"]
    config = compose_config(overrides)
    tokenizer = load_tokenizer(config.dataset.tokenizer_name_or_path)
    layout = "thd" if packed else "bshd"
    model_config = NVLlamaConfig(**{**SHAPE, "vocab_size": 256}, te_backend="reference", attn_input_format=layout)
    precision = plan_precision(config, model_config, torch.device("cpu"))
    multiple = pad_to_multiple or precision.pad_to_multiple
    batch = next(iter(build_train_loader(config, tokenizer, 0, 1, multiple)))
    batch.pop("epoch")
    model = build_model(config, model_config, torch.device("cpu"), precision=precision)
    initialize_weights(model, torch.device("cpu"), seed=5)
    torch.manual_seed(0)
    loss = model(**batch, num_items_in_batch=float((batch["shift_labels"] != IGNORE_INDEX).sum())).loss
    loss.backward()
    return batch["input_ids"].shape[1], loss.item(), {name: p.grad for name, p in model.named_parameters()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    difference = sum((one[name] - other[name]).square().sum() for name in one)
    return (difference / sum(tensor.square().sum() for tensor in other.values())).sqrt().item()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("multiple", [16, 32])
def test_padded_equals_unpadded(packed, multiple):
    length, loss, grads = gradients(None, packed, 1)
    padded_length, padded_loss, padded_grads = gradients(None, packed, multiple)
    assert length == (250 if packed else 50) and padded_length % multiple == 0 < padded_length - length
    assert padded_loss == pytest.approx(loss, rel=1e-6)
    assert distance(padded_grads, grads) < 1e-6


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_more_padding_changes_nothing_in_any_recipe(recipe, packed):
    """Unpadded batches do not run: padded to what is needed, against padded further.

    NVFP4: 16 equal rows of padding add up in the Hadamard transform and set the scale of the whole tensor. The gradient
    then rounds a little differently: by less than 2 %, where its rounding error is 33 % (of a single micro-batch).
    """
    length, loss, grads = gradients(recipe, packed, 0)
    longer, same_loss, same_grads = gradients(recipe, packed, 160)
    assert length == (256 if packed else 64) and longer == (320 if packed else 160)
    assert same_loss == pytest.approx(loss, rel=1e-6)
    assert distance(same_grads, grads) < (2e-2 if recipe == "NVFP4BlockScaling" else 1e-6)


def test_unpadded_batches_are_refused():
    with pytest.raises(ValueError, match=r"needs the product of the leading dims \(250\) to be a multiple of 8"):
        gradients("Float8CurrentScaling", True, 1)
