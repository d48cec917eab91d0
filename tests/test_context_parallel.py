"""Context parallelism: ranks that share sequences compute what one rank computes, from data that is read once."""

import json
import math
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import te_reference
from collator import BSHDCollator, THDCollator
from config import TrainConfig
from context_parallel import (
    SplitBatches,
    all_to_all_size,
    bytes_per_layer,
    init_context_parallel,
    set_context_parallel_group,
    split_batch,
)
from dataset import build_train_loader, load_tokenizer
from dist_utils import run_on_ranks, run_script
from distributed import DistributedContext, all_reduce_sum, global_grad_norm
from errors import ConfigError
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM
from precision import PrecisionPlan
from te_reference import context_parallel as ring
from te_reference import recipe as te_recipe
from test_config import compose_config
from train_fsdp2_cp import shard
from training import next_global_batch, sequence_lengths
from weight_init import initialize_weights


HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 4, 2, 8, 32, 64
RAGGED = [3, 9, 16, 1, 24, 8, 37]  # shorter than 2C = 8, odd, exact multiples


def packed(lengths, multiple, seed=0, num_tokens=128):
    """A THD micro-batch of random windows; the same windows for every ``multiple``."""
    generator = np.random.default_rng(seed)
    windows = [generator.integers(4, VOCABULARY, size) for size in lengths]
    collate = THDCollator(0, num_tokens, max_seq_length=40, sequence_pad_multiple=multiple)
    return {**collate(windows), "epoch": 0}


def padded(lengths, multiple, seed=0):
    """A BSHD micro-batch of random windows."""
    generator = np.random.default_rng(seed)
    windows = [generator.integers(4, VOCABULARY, size) for size in lengths]
    return {**BSHDCollator(0, multiple)(windows), "epoch": 0}


def in_order(parts):
    """Puts two ranks' chunks of one sequence back together, by hand: chunks 0 3 | 1 2."""
    (first, last), (second, third) = (part.chunk(2) for part in parts)
    return torch.cat([first, second, third, last])


# --- splitting


def test_two_ranks_hold_the_reported_tokens_and_targets():
    batch = BSHDCollator(0, 4)([np.arange(8)])
    parts = [split_batch(batch, rank, 2) for rank in range(2)]
    assert parts[0]["input_ids"].tolist() == [[0, 1, 6, 7]]
    assert parts[1]["input_ids"].tolist() == [[2, 3, 4, 5]]
    assert parts[0]["shift_labels"].tolist() == [[1, 2, 7, -100]]
    assert parts[1]["shift_labels"].tolist() == [[3, 4, 5, 6]]
    assert all("labels" not in part and part["max_length_q"] == 8 for part in parts)


def test_targets_do_not_cross_packed_documents():
    collate = THDCollator(0, 16, max_seq_length=8, sequence_pad_multiple=4)
    parts = [split_batch(collate([np.arange(10, 18), np.arange(20, 25)]), rank, 2) for rank in range(2)]
    assert parts[0]["input_ids"].tolist() == [[10, 11, 16, 17, 20, 21, 0, 0]]
    assert parts[0]["shift_labels"].tolist() == [[11, 12, 17, -100, 21, 22, -100, -100]]
    assert parts[1]["input_ids"].tolist() == [[12, 13, 14, 15, 22, 23, 24, 0]]
    assert parts[1]["shift_labels"].tolist() == [[13, 14, 15, 16, 23, 24, -100, -100]]
    for part in parts:
        assert part["cu_seq_lens_q"].tolist() == [0, 8, 13] and part["cu_seq_lens_q_padded"].tolist() == [0, 8, 16]
        assert part["max_length_q"] == 8 and part["pad_between_seqs"] is True


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_out_a_ragged_batch(size):
    batch = packed(RAGGED, 2 * size)
    batch["input_ids"] = torch.arange(128)[None]
    parts = [split_batch(batch, rank, size) for rank in range(size)]
    assert sorted(torch.cat([part["input_ids"][0] for part in parts]).tolist()) == list(range(128))
    assert {part["input_ids"].shape for part in parts} == {(1, 128 // size)}
    assert sum(int(part["attention_mask"].sum()) for part in parts) == sum(RAGGED)


def test_lengths_count_real_tokens_only():
    assert sequence_lengths(packed(RAGGED, 1)).tolist() == [*RAGGED, 0]
    assert sequence_lengths(packed(RAGGED, 8))[: len(RAGGED)].tolist() == RAGGED
    assert sequence_lengths(packed(RAGGED, 8)).sum() == sum(RAGGED)


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="multiple of 8"):
        split_batch(padded([12], 4), 0, 4)
    with pytest.raises(ValueError, match="cu_seq_lens_q_padded is missing"):
        split_batch(packed(RAGGED, 1), 0, 2)
    with pytest.raises(ValueError, match="sequences end at"):
        batch = packed(RAGGED, 4)
        split_batch({**batch, "cu_seq_lens_q_padded": batch["cu_seq_lens_q_padded"][:-1]}, 0, 2)


# --- equality


def tiny_config(**fields):
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    return NVLlamaConfig(**shape | fields, te_backend="reference")


def train(dp_size, cp_size, layout, num_steps, num_micro_batches, checkpointing):
    """Losses of ``num_steps`` steps over ``num_micro_batches`` each; gradients, norm and counts of the first."""
    world_size = dp_size * cp_size
    ctx = DistributedContext(dist.get_rank(), dist.get_rank(), world_size, torch.device("cpu"))
    cp = init_context_parallel(ctx, cp_size, "p2p", HEADS, KV_HEADS)
    config = tiny_config(attn_input_format=layout, activation_checkpointing=checkpointing)
    model = NVLlamaForCausalLM(config)
    set_context_parallel_group(model, cp, ctx.device)
    shard(model, TrainConfig(), ctx)
    initialize_weights(model, ctx.device, seed=1)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def batches():
        for k in range(cp.dp_rank, num_micro_batches * num_steps, dp_size):
            if layout == "thd":
                yield packed(RAGGED[k % 3 :], cp.sequence_multiple, seed=k)
            else:
                yield padded([(5, 24, 17), (13, 8, 2), (16, 16, 16), (1, 30, 9)][k % 4], cp.sequence_multiple, seed=k)

    iterator = batches()
    losses, first = [], {}
    for step in range(num_steps):
        batch = next_global_batch(
            iterator, num_micro_batches // dp_size, ctx.device, cp_rank=cp.cp_rank, cp_size=cp_size
        )
        loss = torch.zeros(())
        for micro_batch in batch.micro_batches:
            micro_loss = model(**micro_batch, num_items_in_batch=batch.num_targets).loss
            micro_loss.backward()
            loss += micro_loss.detach()
        losses.append(all_reduce_sum(loss).item())
        if step == 0:
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            counts = torch.tensor([batch.num_unpadded_tokens, batch.sum_seq_len_squared])
            first = {
                "grads": {n: (g.full_tensor() if world_size > 1 else g).clone() for n, g in grads.items()},
                "norm": global_grad_norm(parameters).item(),
                "counts": all_reduce_sum(counts).tolist(),
            }
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **first}


def loss_and_gradients(cp_size, recipe):
    """Of one packed batch, the same for every ``cp_size``, in low precision; then with every rank's own scales."""
    ctx = DistributedContext(dist.get_rank(), dist.get_rank(), cp_size, torch.device("cpu"))
    cp = init_context_parallel(ctx, cp_size, "p2p", HEADS, KV_HEADS)
    config = tiny_config(intermediate_size=64, initializer_range=0.2, attn_input_format="thd")
    model = NVLlamaForCausalLM(config, PrecisionPlan((getattr(te_recipe, recipe)(),) * 2, te_reference))
    initialize_weights(model, ctx.device, seed=1)
    set_context_parallel_group(model, cp, ctx.device)
    batch = packed(RAGGED, 256, num_tokens=2048)  # chunks of 32 tokens with four ranks: whole blocks of MXFP8
    num_targets = (batch["shift_labels"] != -100).sum()
    local = split_batch({key: value for key, value in batch.items() if key != "epoch"}, cp.cp_rank, cp.cp_size)
    results = []
    for shared in (True, False):
        if not shared:
            for module in model.modules():
                if hasattr(module, "amax_reduction_group"):
                    module.amax_reduction_group = None
        model.zero_grad()
        loss = model(**local, num_items_in_batch=num_targets).loss
        loss.backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        for value in (loss := loss.detach(), gradients):
            dist.all_reduce(value)
        results.append((loss.item(), gradients))
    return results


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_low_precision_does_not_depend_on_the_ranks_that_share_a_sequence(recipe, cp_size):
    expected_loss, expected = run_on_ranks(loss_and_gradients, 1, 1, recipe)[0][0]
    shared, own = run_on_ranks(loss_and_gradients, cp_size, cp_size, recipe)[0]
    assert shared[0] == pytest.approx(expected_loss, rel=1e-5)
    error, error_of_own_scales = (torch.dist(g, expected) / expected.norm() for _, g in (shared, own))
    assert error < 1e-5
    assert (error_of_own_scales > 1e-2) == (recipe == "Float8CurrentScaling")


def train_both(dp_size, cp_size, *arguments):
    return {layout: train(dp_size, cp_size, layout, *arguments) for layout in ("bshd", "thd")}


@pytest.fixture(scope="module")
def one_rank():
    """By (steps, micro-batches per step)."""
    return {run: run_on_ranks(train_both, 1, 1, 1, *run, "off")[0] for run in ((20, 1), (3, 4))}


@pytest.mark.parametrize(
    "dp_size, cp_size, num_steps, num_micro_batches, checkpointing",
    [(1, 2, 20, 1, "full"), (1, 4, 20, 1, "off"), (2, 2, 3, 4, "off"), (4, 1, 3, 4, "off")],
)
def test_ranks_that_share_sequences_train_as_one_rank_does(
    one_rank, dp_size, cp_size, num_steps, num_micro_batches, checkpointing
):
    arguments = dp_size, cp_size, num_steps, num_micro_batches, checkpointing
    for rank in run_on_ranks(train_both, dp_size * cp_size, *arguments):
        for layout, expected in one_rank[num_steps, num_micro_batches].items():
            got = rank[layout]
            assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5), layout
            assert got["norm"] == pytest.approx(expected["norm"], rel=1e-5)
            assert got["counts"] == expected["counts"]
            for name, grad in expected["grads"].items():
                assert torch.dist(got["grads"][name], grad) <= 1e-5 * grad.norm(), (layout, name)


# --- the ring


def attend(comm_type, hidden, grad, block_scores):
    """One attention block over the ranks: output and input gradient, put together, and bytes that this rank sent."""
    ring.SCORES_PER_BLOCK = block_scores
    size, rank = dist.get_world_size(), dist.get_rank()
    ctx = DistributedContext(rank, rank, size, torch.device("cpu"))
    cp = init_context_parallel(ctx, size, comm_type, HEADS, KV_HEADS)
    torch.manual_seed(0)
    layer = te_reference.MultiheadAttention(
        WIDTH,
        HEADS,
        kv_channels=HEAD_DIM,
        num_gqa_groups=KV_HEADS,
        attention_dropout=0.0,
        input_layernorm=True,
        fuse_qkv_params=True,
        bias=False,
        normalization="RMSNorm",
        qkv_format="bshd",
    )
    with torch.no_grad():
        layer.layernorm_qkv.weight.mul_(20.0)  # so that the softmax is far from uniform
    angles = te_reference.RotaryPositionEmbedding(HEAD_DIM)(hidden.shape[1])
    if size > 1:
        layer.set_context_parallel_group(cp.group, cp.global_ranks, None, comm_type)
    indices = ring.zigzag_indices(torch.tensor([0, hidden.shape[1]]), rank, size)
    local = hidden[:, indices].requires_grad_()

    sent = {"forward": 0, "backward": 0}
    now, original = "forward", dist.batch_isend_irecv

    def counting(operations):
        sent[now] += sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return original(operations)

    dist.batch_isend_irecv = counting
    out = layer(local, rotary_pos_emb=angles)
    now = "backward"
    out.backward(grad[:, indices])
    whole = torch.zeros(2, *hidden.shape)
    whole[0][:, indices], whole[1][:, indices] = out.detach(), local.grad
    return all_reduce_sum(whole), (sent["forward"], sent["backward"])


@pytest.mark.parametrize(
    "size, comm_type, block_scores",
    [(2, "p2p", 2**22), (2, "all_gather", 200), (2, "a2a", 2**22), (4, "a2a+p2p", 100), (4, "p2p", 2**22)],
)
def test_every_comm_type_gives_the_result_of_one_rank_and_sends_the_bytes_of_the_table(size, comm_type, block_scores):
    torch.manual_seed(3)
    hidden, grad = torch.randn(2, 2, 32, WIDTH)
    (expected, _), *_ = run_on_ranks(attend, 1, "p2p", hidden, grad, 2**22)
    for whole, sent in run_on_ranks(attend, size, comm_type, hidden, grad, block_scores):
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        assert sent == bytes_per_layer("p2p", 2 * 32, size, HEADS, KV_HEADS, HEAD_DIM, element_bytes=4)


def attend_packed(qkv, batch):
    """Packed attention without a layer around it: all rows, put together over the ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    attention = te_reference.DotProductAttention(
        HEADS, HEAD_DIM, num_gqa_groups=KV_HEADS, qkv_format="thd", attn_mask_type="padding_causal"
    )
    rows = torch.arange(128)
    if size > 1:
        attention.set_context_parallel_group(dist.group.WORLD, list(range(size)), None)
        rows = split_batch({**batch, "input_ids": rows[None]}, rank, size)["input_ids"][0]
    whole = torch.zeros(128, HEADS * HEAD_DIM)
    whole[rows] = attention(
        *(x[rows] for x in qkv),
        cu_seqlens_q=batch["cu_seq_lens_q"],
        cu_seqlens_q_padded=batch["cu_seq_lens_q_padded"],
        pad_between_seqs=True,
    )
    return all_reduce_sum(whole)


def test_rows_of_padding_come_back_as_zeros():
    batch = packed(RAGGED, 8, num_tokens=128)
    qkv = [torch.randn(128, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    expected = run_on_ranks(attend_packed, 1, qkv, batch)[0]
    tail = int(batch["cu_seq_lens_q_padded"][len(RAGGED)])  # what follows is documents of padding
    assert (expected[:tail][batch["attention_mask"][0, :tail] == 0] == 0).all()
    for whole in run_on_ranks(attend_packed, 2, qkv, batch):
        torch.testing.assert_close(whole, expected)


def test_bytes_per_layer_by_hand():
    # Llama-3.2-1B, 131,072 tokens over 4 ranks: 32,768 each, of 8 * 64 keys and as many values, 2 bytes: 64 MiB.
    mib = 2**20
    arguments = (131_072, 4, 32, 8, 64)
    assert bytes_per_layer("p2p", *arguments) == (3 * 64 * mib, 6 * 64 * mib)
    assert bytes_per_layer("all_gather", *arguments) == (3 * 64 * mib, 6 * 64 * mib)
    # q and output 128 MiB each, k and v 32 MiB each; a quarter stays.
    assert bytes_per_layer("a2a", *arguments) == (240 * mib, 240 * mib)
    # Two ranks swap halves of 320 MiB, then one move of KV.
    assert bytes_per_layer("a2a+p2p", *arguments, a2a_size=2) == ((160 + 64) * mib, (160 + 128) * mib)
    assert bytes_per_layer("p2p", 131_072, 1, 32, 8, 64) == (0, 0)
    with pytest.raises(ValueError, match="a2a_size"):
        bytes_per_layer("a2a+p2p", *arguments)
    with pytest.raises(ValueError, match="cp_comm_type='ring'"):
        bytes_per_layer("ring", *arguments)


def test_all_to_all_needs_heads_to_hand_out():
    assert all_to_all_size("p2p", 16, 32, 8, 8) == 1
    assert all_to_all_size("a2a", 8, 32, 8, 8) == 8
    assert all_to_all_size("a2a+p2p", 16, 32, 8, 8) == 8
    assert all_to_all_size("a2a+p2p", 8, 32, 8, 8) == 4  # a proper divisor
    assert all_to_all_size("a2a+p2p", 16, 32, 8, 4) == 4  # inside a node
    with pytest.raises(ValueError, match=r"num_key_value_heads=8 out over cp_size=16"):
        all_to_all_size("a2a", 16, 32, 8, 16)
    with pytest.raises(ValueError, match="there is none"):
        all_to_all_size("a2a+p2p", 3, 9, 3, 8)


# --- memory


class PeakMemory(TorchDispatchMode):
    """Greatest number of bytes alive at once among the tensors made inside."""

    def __init__(self):
        super().__init__()
        self._alive, self.peak_bytes = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._alive:
                    self._alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
        return out


def peak_and_saved_bytes(num_tokens):
    """Of a forward and backward pass of a layer over one sequence, shared by all ranks."""
    size = dist.get_world_size()
    ring.SCORES_PER_BLOCK = 2**16
    layer = te_reference.TransformerLayer(
        WIDTH,
        3 * WIDTH,
        HEADS,
        num_gqa_groups=KV_HEADS,
        kv_channels=HEAD_DIM,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attn_input_format="bshd",
    )
    if size > 1:
        layer.set_context_parallel_group(dist.group.WORLD, list(range(size)), None)
    angles = te_reference.RotaryPositionEmbedding(HEAD_DIM)(num_tokens)
    hidden = torch.randn(1, num_tokens // size, WIDTH, requires_grad=True)
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with PeakMemory() as memory:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = layer(hidden, rotary_pos_emb=angles)
        out.sum().backward()
    return memory.peak_bytes, sum(kept.values())


def test_memory_per_rank_falls_with_the_ranks():
    (peak, saved), *_ = run_on_ranks(peak_and_saved_bytes, 1, 4096)
    for rank_peak, rank_saved in run_on_ranks(peak_and_saved_bytes, 2, 4096):
        assert rank_saved <= 0.55 * saved
        assert rank_peak <= 0.6 * peak


# --- data


def read_epoch(config, num_batches):
    """This rank's chunks of its first micro-batches, and its place in the mesh."""
    ctx = DistributedContext(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    cp = init_context_parallel(ctx, config.cp_size, config.cp_comm_type, HEADS, KV_HEADS)
    tokenizer = load_tokenizer(config.dataset.tokenizer_name_or_path)
    loader = build_train_loader(config, tokenizer, cp.dp_rank, cp.dp_size, sequence_pad_multiple=cp.sequence_multiple)
    batches = iter(SplitBatches(loader, cp.cp_rank, cp.cp_size))
    return (cp.dp_rank, cp.cp_rank), [next(batches)["input_ids"] for _ in range(num_batches)]


def test_every_record_of_an_epoch_is_read_once_over_two_groups_of_two(tmp_path):
    records = ["ACGT"[i % 4] * (1 + i % 7) + format(i, "05d") for i in range(48)]
    pq.write_table(pa.table({"sequence": records}), tmp_path / "records.parquet")
    config = compose_config(
        [
            f"dataset.load_dataset_kwargs={{path: {tmp_path}/records.parquet}}",
            "cp_size=2",
            "dataset.micro_batch_size=2",
            "dataset.max_seq_length=32",
            "dataset.num_shards=4",
            "dataset.num_workers=0",
        ],
        name="L0_sanity_cp",
        script="train_fsdp2_cp",
        world_size=4,
    )
    tokenizer = load_tokenizer(config.dataset.tokenizer_name_or_path)
    parts = dict(run_on_ranks(read_epoch, 4, config, 12))  # 12 batches * 2 records * 2 groups = 48
    seen = Counter()
    for dp_rank in range(2):
        for batch in zip(parts[dp_rank, 0], parts[dp_rank, 1], strict=True):
            for rows in zip(*batch, strict=True):
                seen[tokenizer.decode(in_order(rows), skip_special_tokens=True)] += 1
    assert seen == Counter(records)


# --- the script, the configuration


def metrics(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_script_resumes_with_another_number_of_ranks(tmp_path):
    common = [
        "--config-name=L0_sanity_cp",
        "use_sequence_packing=true",
        "dataset.num_workers=0",
        "dataset.max_seq_length=64",
        "num_train_steps=4",
        "validation.max_batches=2",
        f"checkpoint.ckpt_dir={tmp_path}",
    ]
    run_script("train_fsdp2_cp.py", [*common, "cp_size=2", "checkpoint.save_every_n_steps=2"], world_size=2)
    shared = metrics(tmp_path / "train_fsdp2_cp" / "metrics.jsonl")
    assert [line["step"] for line in shared] == [1, 2, 3, 4]
    (tmp_path / "train_fsdp2_cp" / "step_4").rename(tmp_path / "away")
    (tmp_path / "train_fsdp2_cp" / "metrics.jsonl").unlink()
    run_script("train_fsdp2_cp.py", [*common, "cp_size=1", "checkpoint.resume_from_checkpoint=true"], world_size=1)
    alone = metrics(tmp_path / "train_fsdp2_cp" / "metrics.jsonl")
    assert [line["step"] for line in alone] == [3, 4]
    for one, two in zip(alone, shared[2:], strict=True):
        assert math.isclose(one["loss"], two["loss"], rel_tol=1e-5)
        assert math.isclose(one["grad_norm"], two["grad_norm"], rel_tol=1e-4)
        assert one["consumed_tokens"] == two["consumed_tokens"]
    assert math.isclose(alone[-1]["validation_loss"], shared[-1]["validation_loss"], rel_tol=1e-5)


@pytest.mark.parametrize(
    "overrides, world_size, message",
    [
        (["cp_size=2"], 3, "cp_size=2 does not divide the world size 3"),
        (["cp_size=0"], 1, "cp_size=0 must be at least 1"),
        (["cp_comm_type=ring"], 2, "cp_comm_type='ring' is not one of"),
        (["dataset.max_seq_length=254"], 2, r"max_seq_length=254 is not a multiple of 2 \* cp_size = 4"),
        (["use_sequence_packing=true", "dataset.token_micro_batch_size=1022"], 2, "token_micro_batch_size=1022 is not"),
        (["use_te=false"], 2, "cp_size=2 must be 1"),
        (["use_torch_compile=true"], 2, "use_torch_compile=true"),
        (
            ["dataset.num_shards=6"],
            8,
            r"num_shards=6 must be at most 10.6 and a multiple of data-parallel size .* = 4 \* 1",
        ),
    ],
)
def test_broken_rule_names_value_and_fix(overrides, world_size, message):
    with pytest.raises(ConfigError, match=message):
        compose_config(["cp_size=2", *overrides], name="L0_sanity_cp", script="train_fsdp2_cp", world_size=world_size)


def test_shards_follow_the_data_parallel_size():
    overrides = ["cp_size=2", "dataset.num_shards=4"]
    compose_config(overrides, name="L0_sanity_cp", script="train_fsdp2_cp", world_size=8)


def test_other_scripts_refuse_cp_size():
    with pytest.raises(ConfigError, match="train_fsdp2 would ignore it"):
        compose_config(["cp_size=2"], script="train_fsdp2", world_size=2)


def test_reference_refuses_what_te_would():
    attention = te_reference.DotProductAttention(3, 8, num_gqa_groups=3, qkv_format="bshd")
    with pytest.raises(ValueError, match="cp_comm_type='ring'"):
        attention.set_context_parallel_group(None, [0], None, "ring")
    with pytest.raises(ValueError, match=r"takes \[a2a group, p2p group\]"):
        attention.set_context_parallel_group([None, None], [0, 1], None, "p2p")
