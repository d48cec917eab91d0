"""NVMixtralForCausalLM against Hugging Face's MixtralForCausalLM with the same weights, FP32, CPU."""

import copy
import math

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import mixture_of_experts
from convert import convert_mixtral_hf_to_te, convert_mixtral_te_to_hf
from modeling_mixtral_te import NVMixtralConfig, NVMixtralForCausalLM


FIELDS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
K, H = 2, 16
LENGTHS = [17, 9, 1, 12]


def stacked_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows per KV head: its queries, key, value."""
    width = q.shape[1]
    return torch.cat((q.view(K, -1, width), k.view(K, H, width), v.view(K, H, width)), dim=1).reshape(-1, width)


def as_ours(hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors under our names."""
    ours = {name: hf[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    for index in range(FIELDS["num_hidden_layers"]):
        old = {name.removeprefix(f"model.layers.{index}."): t for name, t in hf.items() if f"layers.{index}." in name}
        new = {
            "self_attention.layernorm_qkv.layer_norm_weight": old["input_layernorm.weight"],
            "self_attention.layernorm_qkv.weight": stacked_qkv(*(old[f"self_attn.{x}_proj.weight"] for x in "qkv")),
            "self_attention.proj.weight": old["self_attn.o_proj.weight"],
            "post_attention_layernorm.weight": old["post_attention_layernorm.weight"],
            "mlp.gate.weight": old["mlp.gate.weight"],
            "mlp.experts.fc1_weight": old["mlp.experts.gate_up_proj"],
            "mlp.experts.fc2_weight": old["mlp.experts.down_proj"],
        }
        ours |= {f"model.layers.{index}.{name}": tensor for name, tensor in new.items()}
    return ours


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.linalg.norm(found[name] - gradient) <= rtol * torch.linalg.norm(gradient), name


@pytest.fixture(scope="module")
def hf() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**FIELDS, output_router_logits=True)).train()


def build(hf: MixtralForCausalLM, **fields) -> NVMixtralForCausalLM:
    model = NVMixtralForCausalLM(NVMixtralConfig(**FIELDS | fields)).train()
    missing, unexpected = model.load_state_dict(as_ours(hf.state_dict()), strict=False)
    assert not unexpected and all("expert_bias" in name for name in missing)
    return model


def padded_batch(lengths: list[int] = LENGTHS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, FIELDS["vocab_size"], (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed_batch(lengths: list[int] = LENGTHS) -> dict[str, torch.Tensor]:
    """The documents of :func:`padded_batch` back to back."""
    padded = padded_batch(lengths)
    rows = padded["attention_mask"].bool()
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return {
        "input_ids": padded["input_ids"][rows][None],
        "labels": padded["labels"][rows][None],
        "attention_mask": torch.ones(1, sum(lengths), dtype=torch.long),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


@pytest.fixture(scope="module")
def expected(hf):
    """Hugging Face's output and gradients on the padded batch."""
    output = hf(**padded_batch())
    hf.zero_grad()
    output.loss.backward()
    return output, as_ours(gradients(hf))


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_logits_loss_and_gradients_are_hugging_faces(hf, expected, layout):
    reference, reference_gradients = expected
    model = build(hf, attn_input_format=layout)
    output = model(**(padded_batch() if layout == "bshd" else packed_batch()), output_logits=True)
    output.loss.backward()
    real = padded_batch()["attention_mask"].bool()
    logits = output.logits[real] if layout == "bshd" else output.logits[0]
    assert (logits - reference.logits[real]).abs().max() <= 1e-4
    assert abs(output.aux_loss - reference.aux_loss) <= 1e-5
    assert abs(output.loss - reference.loss) <= 1e-5
    assert output.lm_loss < output.loss
    assert_same_gradients(gradients(model), reference_gradients, rtol=1e-4)


def test_auxiliary_loss_leaves_padding_out(hf):
    model = build(hf)
    short = padded_batch()
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    long = {key: torch.nn.functional.pad(value, (0, 9), value=fill[key]) for key, value in short.items()}
    assert model(**short).aux_loss.item() == pytest.approx(model(**long).aux_loss.item(), rel=1e-6)
    assert model(**short).aux_loss > 1
    assert model(**long).tokens_per_expert_LE.sum(1).tolist() == [2 * sum(LENGTHS)] * 3


def test_router_losses_by_their_formulas(hf):
    batch = padded_batch()
    model = build(hf, router_z_loss_coef=0.1)
    logits = hf(**batch).router_logits
    real = batch["attention_mask"].flatten().bool()
    z_loss = torch.stack([layer[real].logsumexp(-1).square().mean() for layer in logits]).mean()
    entropy = [torch.distributions.Categorical(logits=layer[real]).entropy().sum().item() for layer in logits]
    balance = load_balancing_loss_func(logits, 8, 2, batch["attention_mask"])
    output = model(**batch)
    assert output.z_loss.item() == pytest.approx(z_loss.item(), rel=1e-5)
    assert output.entropy_sum_L.tolist() == pytest.approx(entropy, rel=1e-5)
    assert (output.loss - output.lm_loss).item() == pytest.approx((0.02 * balance + 0.1 * z_loss).item(), rel=1e-4)


def test_router_sums_differentiate():
    logits = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    mask = (torch.arange(11) < 7).unsqueeze(1)

    def sums(z):
        return mixture_of_experts._RouterSums.apply(z, mask)[:2]

    assert torch.autograd.gradcheck(sums, (logits,))


def test_validation_loss_has_no_auxiliary_part(hf):
    output = build(hf).eval()(**padded_batch())
    assert output.loss is output.lm_loss


def test_micro_batches_add_up_to_the_global_batch(hf):
    """Auxiliary losses count with the share of the targets, so that the sum over micro-batches is a mean."""
    model, parts = build(hf), [padded_batch(LENGTHS[:2]), padded_batch(LENGTHS[2:])]
    targets = [sum(length - 1 for length in lengths) for lengths in (LENGTHS[:2], LENGTHS[2:])]
    alone = [model(**part).aux_loss.item() for part in parts]
    together = sum(model(**part, num_items_in_batch=torch.tensor(float(sum(targets)))).aux_loss for part in parts)
    assert together.item() == pytest.approx(sum(a * n for a, n in zip(alone, targets)) / sum(targets), rel=1e-6)


def test_a_global_batch_without_targets_adds_nothing(hf):
    model = build(hf, router_z_loss_coef=0.1)
    batch = padded_batch() | {"labels": torch.full_like(padded_batch()["labels"], -100)}
    for num_items in (torch.tensor(0.0), 0.0):
        model.zero_grad()
        output = model(**batch, num_items_in_batch=num_items)
        output.loss.backward()
        assert output.loss == output.lm_loss == output.aux_loss == output.z_loss == 0
        assert all(gradient.eq(0).all() for gradient in gradients(model).values())


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(hf, mode):
    losses, grads = [], []
    for checkpointing in ("off", mode):
        model = build(hf, activation_checkpointing=checkpointing)
        loss = model(**padded_batch()).loss
        loss.backward()
        losses.append(loss.item())
        grads.append(gradients(model))
    assert losses[0] == losses[1]
    assert_same_gradients(grads[1], grads[0], rtol=0)


@pytest.mark.parametrize("alignment", [16, 256])
def test_padding_of_expert_rows_changes_nothing(hf, expected, alignment):
    model = build(hf, expert_token_alignment=alignment)
    loss = model(**padded_batch()).loss
    loss.backward()
    assert abs(loss - expected[0].loss) <= 1e-5
    assert_same_gradients(gradients(model), expected[1], rtol=1e-4)


def test_gradients_accumulate_over_micro_batches(hf, expected):
    model = build(hf)
    for _ in range(2):
        model(**padded_batch()).loss.backward()
    assert_same_gradients({n: g / 2 for n, g in gradients(model).items()}, expected[1], rtol=1e-4)


def test_interleaving_for_the_fused_kernel_round_trips():
    weight = torch.arange(2 * 128 * 3.0).view(2, 128, 3)
    interleaved = mixture_of_experts._interleave(weight)
    assert torch.equal(interleaved[0, :32], weight[0, :32]) and torch.equal(interleaved[0, 32:64], weight[0, 64:96])
    assert torch.equal(mixture_of_experts._deinterleave(interleaved), weight)


def test_bias_balances_without_a_loss():
    """A bias that sends everything to two experts moves until the load is even; weights stay those of the logits."""
    torch.manual_seed(0)
    config = NVMixtralConfig(**FIELDS | {"num_hidden_layers": 1, "router_bias_update_rate": 0.002})
    model = NVMixtralForCausalLM(config).train()
    gate = model.model.layers[0].mlp.gate
    gate.expert_bias[:2] = 0.1
    batch = padded_batch([64] * 8)
    for step in range(80):
        load = model(**batch).tokens_per_expert_LE
        if step == 0:
            assert load[0, :2].tolist() == [512, 512]
        model.update_router_bias(load)
    assert load.amin() > 0 and load.amax() < 256  # the mean is 128
    assert gate.expert_bias.dtype == torch.float32 and "model.layers.0.mlp.gate.expert_bias" in model.state_dict()

    x = torch.randn(5, 64)
    weights, map_TE, _ = gate(x)
    logits = x @ gate.weight.t()
    expected = logits.masked_fill(~map_TE, -math.inf).softmax(-1)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(map_TE.sum(1), torch.full((5,), 2))


def test_router_is_fp32_in_a_bf16_model(hf):
    model = build(hf).to(torch.bfloat16)
    x = torch.randn(64, 64).to(torch.bfloat16)
    weights, _, _ = model.model.layers[0].mlp.gate(x)
    logits = x.double() @ model.model.layers[0].mlp.gate.weight.double().t()
    values, chosen = logits.topk(2)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.gather(1, chosen).double(), values.softmax(-1), rtol=1e-5, atol=1e-6)
    output = model(**padded_batch())
    output.loss.backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_saves_and_loads(hf, tmp_path):
    model = build(hf).eval()
    model.save_pretrained(tmp_path)
    again = NVMixtralForCausalLM.from_pretrained(tmp_path).eval()
    batch = padded_batch()
    assert torch.equal(model(**batch).loss, again(**batch).loss)
    assert "experts.fc1_weight" in " ".join(again.state_dict())


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"intermediate_size": 100}, "multiples of 16"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"router_z_loss_coef": -1.0}, "router_z_loss_coef=-1.0"),
        ({"router_z_loss_coef": float("nan")}, "router_z_loss_coef=nan must be a finite number"),
        ({"router_bias_update_rate": float("inf")}, "router_bias_update_rate=inf"),
        ({"expert_token_alignment": 0}, "expert_token_alignment=0"),
        ({"fused_grouped_mlp": True, "te_backend": "reference"}, "fused_grouped_mlp=true cannot run: .*te_reference"),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        NVMixtralConfig(**FIELDS | fields).check()


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_converted_model_generates_hugging_faces_tokens(hf, layout):
    """convert.py's model, with its KV cache, prompts padded on the left; and back again, byte for byte."""
    hf = copy.deepcopy(hf).eval()
    hf.config.output_router_logits = False
    model = convert_mixtral_hf_to_te(hf, attn_input_format=layout, te_backend="reference")
    ids = torch.randint(1, FIELDS["vocab_size"], (2, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = hf.generate(input_ids=ids, attention_mask=mask, **options)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **options), expected)
    back = convert_mixtral_te_to_hf(model).state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in hf.state_dict().items())
