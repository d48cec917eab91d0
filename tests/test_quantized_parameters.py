"""Parameters held in a compute format, delayed scaling's state: in every layout, through checkpoints and exports."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import te_reference
from dist_utils import run_on_ranks
from distributed import local_tensor
from export import save_final_model
from low_precision import Run, make_config
from modeling_llama_te import NVLlamaForCausalLM
from paths import PROJECT_DIR
from quantized_parameters import delayed_scaling_tensors, dequantized, is_quantized, unchanged_scales
from te_reference.emulation import quantize
from te_reference.quantized_weight import QuantizedWeight
from te_reference.recipe import RECIPES


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

QINIT_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
MATRICES = ("layernorm_qkv.weight", "proj.weight", "fc1_weight", "fc2_weight")


@pytest.mark.parametrize("use_meta_device", [True, False])
@pytest.mark.parametrize("recipe", QINIT_RECIPES)
def test_matrices_are_held_in_the_compute_format_and_nothing_else_is(recipe, use_meta_device):
    """Pitfall 3: quantised init that silently does nothing. The type, and the memory that it takes."""
    run = Run(make_config(recipe, qinit=True, use_meta_device=use_meta_device))
    plain = Run(make_config())
    for (name, parameter), (_, expected) in zip(run.model.named_parameters(), plain.model.named_parameters()):
        assert is_quantized(parameter) == name.endswith(MATRICES), name
        assert parameter.dtype == expected.dtype and parameter.shape == expected.shape
        if is_quantized(parameter):
            copies = {id(copy): copy for copy in vars(parameter.operands).values()}.values()
            assert all(copy.data.element_size() == 1 and copy.data.shape == parameter.shape for copy in copies)
            assert len(copies) == (2 if recipe == "MXFP8BlockScaling" else 1)
            if recipe != "DelayedScaling":  # its first scale is 1: small weights underflow, in TE as here
                error = (dequantized(parameter) - expected).norm() / expected.norm()
                assert 0 < error < (0.15 if recipe == "NVFP4BlockScaling" else 0.04)
        else:
            assert torch.equal(parameter, expected)


@pytest.mark.parametrize("recipe", [recipe for recipe in QINIT_RECIPES if recipe != "DelayedScaling"])
def test_with_masters_from_the_initial_values_it_is_training_with_masters(recipe):
    """The same numbers: quantising the FP32 master after a step, or the FP32 weight in the next forward pass.

    Not so with delayed scaling: the scales of a step earlier.
    """
    masters = Run(make_config(recipe, qinit=True, preserve=True)).train(1, 5)
    assert masters == Run(make_config(recipe)).train(1, 5)
    assert masters != Run(make_config(recipe, qinit=True)).train(1, 5)  # masters from the quantised values


def test_initial_values_are_kept_on_request_and_freed():
    config = make_config("MXFP8BlockScaling", qinit=True, preserve=True)
    run, plain = Run(config), dict(Run(make_config()).model.named_parameters())
    for name, parameter in run.model.named_parameters():
        if is_quantized(parameter):
            assert torch.equal(run.optimizer.state[parameter]["master_param"], plain[name])
            assert local_tensor(parameter).get_high_precision_init_val() is None


def train_in_every_layout(recipe: str) -> dict[tuple[str, bool], list[float]]:
    return {
        (layout, qinit): Run(make_config(recipe, qinit=qinit, preserve=qinit), layout).train(1, 4)
        for layout in ("ddp", "fsdp2")
        for qinit in (False, True)
    }


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"])
def test_layouts_agree(recipe):
    """DDP and FSDP2 over 2 ranks, with and without quantised parameters: shards quantise as the whole does."""
    results = run_on_ranks(train_in_every_layout, 2, recipe)[0]
    for qinit in (False, True):
        assert results["ddp", qinit] == pytest.approx(results["fsdp2", qinit], rel=1e-4)
    assert results["ddp", True] == pytest.approx(results["ddp", False], rel=1e-2)
    if recipe != "DelayedScaling":
        assert results["fsdp2", True] == results["fsdp2", False]


def interrupted(layout: str, folder: str, recipe: str, qinit: bool, preserve: bool) -> tuple[list[float], list[float]]:
    """Losses of steps 4 to 6: uninterrupted, and resumed after step 3 by another model object."""

    def config(where: str):
        return make_config(recipe, qinit, preserve, folder=f"{folder}/{where}")

    uninterrupted = Run(config("a"), layout)
    uninterrupted.train(1, 3)
    stopped = Run(config("b"), layout)
    stopped.train(1, 3)
    stopped.checkpointer.save(3, {"rng": torch.get_rng_state()})
    resumed = Run(config("b"), layout)
    loaded = resumed.checkpointer.load()
    torch.set_rng_state(loaded.rank_states[resumed.rank]["rng"])
    after = resumed.train(4, 6)
    torch.set_rng_state(loaded.rank_states[resumed.rank]["rng"])
    return uninterrupted.train(4, 6), after


CASES = [
    ("DelayedScaling", False, False),
    ("Float8CurrentScaling", False, False),
    ("DelayedScaling", True, True),
    ("Float8CurrentScaling", True, False),
    ("MXFP8BlockScaling", True, True),
]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("recipe, qinit, preserve", CASES)
def test_resumed_run_is_the_uninterrupted_one(tmp_path, layout, recipe, qinit, preserve):
    """Pitfalls 1 and 2, bit for bit."""
    for expected, resumed in run_on_ranks(interrupted, 2, layout, str(tmp_path), recipe, qinit, preserve):
        assert resumed == expected


@pytest.mark.parametrize("qinit", [False, True])
def test_resume_with_stochastic_rounding(tmp_path, qinit):
    expected, resumed = interrupted("plain", str(tmp_path), "NVFP4BlockScaling", qinit, False)
    assert resumed == expected


def save_after_two_steps(folder: str) -> list[float]:
    run = Run(make_config("MXFP8BlockScaling", qinit=True, folder=folder, num_train_steps=2), "fsdp2")
    run.train(1, 2)
    run.checkpointer.config.async_save = True
    run.checkpointer.save(2, {})
    run.checkpointer.close()
    return [p.full_tensor().sum().item() for p in run.parameters if not is_quantized(p)]


def test_a_sharded_checkpoint_resumes_on_one_process(tmp_path):
    """The masters are cut anew; blocks need not be. Saved in the background."""
    run_on_ranks(save_after_two_steps, 2, str(tmp_path))
    run = Run(make_config("MXFP8BlockScaling", qinit=True, folder=str(tmp_path)))
    assert run.checkpointer.load().step == 2
    for parameter in filter(is_quantized, run.parameters):
        expected = quantize(run.optimizer.state[parameter]["master_param"], RECIPES["MXFP8BlockScaling"](), "weight")
        assert torch.equal(parameter.operands.rowwise.payload(), expected.rowwise.payload())
        assert torch.equal(parameter.operands.columnwise.scale_inv, expected.columnwise.scale_inv)
    assert run.train(3, 3)


def test_a_checkpoint_of_another_precision_is_refused(tmp_path):
    run = Run(make_config("DelayedScaling", folder=str(tmp_path)))
    run.train(1, 1)
    run.checkpointer.save(1, {})
    with pytest.raises(ValueError, match=r"scaling\..* is in the checkpoint only[\s\S]*fp8_config"):
        Run(make_config(folder=str(tmp_path))).checkpointer.load()


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "MXFP8BlockScaling"])
def test_final_model_holds_the_values_that_were_computed_with(tmp_path, recipe):
    run = Run(make_config(recipe, qinit=True, dtype="bfloat16"))
    run.train(1, 2)
    tokenizer = AutoTokenizer.from_pretrained(PROJECT_DIR / "tokenizers" / "nucleotide_fast_tokenizer")
    save_final_model(run.model, tokenizer, tmp_path / "final_model")
    saved = load_file(tmp_path / "final_model" / "model.safetensors")
    for name, parameter in run.model.named_parameters():
        assert saved[name].dtype == torch.bfloat16
        assert torch.equal(saved[name], dequantized(parameter)), name
    loaded = NVLlamaForCausalLM.from_pretrained(tmp_path / "final_model", dtype=torch.bfloat16)
    batch = run.batch(1, 0)
    with torch.no_grad():
        # Without autocast both multiply in BF16; the one by values, the other by what it dequantises.
        run.model.model.precision = loaded.model.precision
        assert torch.equal(loaded(**batch).loss, run.model(**batch).loss)


def masters_from_pretrained(folder: str) -> bool:
    """Whether the masters of quantised shards are the stored weights."""
    run = Run(make_config("MXFP8BlockScaling", qinit=True, preserve=True, init_from_pretrained=folder), "fsdp2")
    stored = load_file(f"{folder}/model.safetensors")
    return all(
        torch.equal(run.optimizer.state[parameter]["master_param"].full_tensor(), stored[name])
        for name, parameter in run.model.named_parameters()
        if is_quantized(parameter)
    )


def test_pretrained_weights_seed_the_masters(tmp_path):
    source = Run(make_config())
    source.train(1, 2)
    source.model.save_pretrained(tmp_path)
    assert run_on_ranks(masters_from_pretrained, 2, str(tmp_path)) == [True, True]


def test_validation_does_not_move_the_scales():
    run = Run(make_config("DelayedScaling"))
    run.train(1, 2)
    before = {name: tensor.clone() for name, tensor in delayed_scaling_tensors(run.model).items()}
    assert len(before) == 2 * 4 * 2 * 2  # layers, linear layers, directions, scale and history
    with torch.no_grad(), unchanged_scales(run.model):
        run.model(**run.batch(9, 0))
    after = delayed_scaling_tensors(run.model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_quantized_weight_behaves_as_its_values():
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    run = Run(make_config("MXFP8BlockScaling", qinit=True))
    weight = run.model.model.layers[0].self_attention.proj.weight
    assert isinstance(weight, QuantizedWeight) and isinstance(weight, torch.nn.Parameter)
    x = torch.randn(4, 64)
    assert torch.equal(torch.nn.functional.linear(x, weight), x @ dequantized(weight).T)
    alias = weight.detach()
    with torch.no_grad():
        weight.copy_(torch.cat([values, values]))
    expected = quantize(torch.cat([values, values]), weight.quantizer.recipe, "weight").rowwise.dequantize()
    assert torch.equal(alias.dequantize(), expected)  # in place
    with torch.no_grad():
        weight.fill_(0.5)
    assert torch.equal(weight.float(), torch.full((64, 64), 0.5))


def test_optimiser_without_masters_is_refused():
    run = Run(make_config("MXFP8BlockScaling", qinit=True))
    optimizer = te_reference.optimizers.FusedAdam(run.parameters)
    run.model(**run.batch(1, 0)).loss.backward()
    with pytest.raises(ValueError, match="master_weights=True"):
        optimizer.step()
