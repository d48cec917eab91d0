"""Expert parallelism over gloo: dispatch, layouts, resuming across layouts, the script."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_reference
from checkpoint import Checkpointer
from config import CheckpointConfig, ParallelismConfig, SchedulerConfig, TrainConfig
from config_rules import find_problems
from dist_utils import run_on_ranks, run_script
from distributed import DistributedContext
from expert_parallel import TokenDispatcher, check_layout
from mixture_of_experts import RouterTotals
from modeling_mixtral_te import NVMixtralConfig, NVMixtralForCausalLM
from optimizer import build_optimizer, clip_and_step
from scheduler import build_scheduler
from train_fsdp2_ep import shard
from weight_init import initialize_weights


E, A, D, T = 8, 2, 16, 6
FIELDS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": E,
    "num_experts_per_tok": A,
    "router_aux_loss_coef": 0.02,
    "router_z_loss_coef": 0.001,
    "max_position_embeddings": 64,
}
MICRO_BATCHES = 4  # of a global batch


# Chosen experts of every token, per rank: uneven and full of corner cases.
ROUTINGS = {
    "all to expert 0 and 1": lambda rank, token: (0, 1),
    "only the last rank's experts": lambda rank, token: (E - 1, E - 2),
    "spread": lambda rank, token: ((token + rank) % E, (3 * token + rank + 1 + (token + rank) % E) % E),
    "each rank to its own": lambda rank, token: (2 * rank, 2 * rank + 1),
}


def _dispatch_all() -> dict[str, float]:
    return {name: _dispatch(name) for name in ROUTINGS}


def _dispatch(routing: str) -> float:
    """Largest error of outputs and gradients against the same computation without dispatch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(T, D, generator=generator, requires_grad=True)
    chosen = torch.tensor([ROUTINGS[routing](rank, token) for token in range(T)])
    chosen[:, 1] = torch.where(chosen[:, 0] == chosen[:, 1], (chosen[:, 1] + 1) % E, chosen[:, 1])
    map_TE = torch.zeros(T, E, dtype=torch.bool).scatter_(1, chosen, True)
    weights = (torch.rand(T, E, generator=generator) * map_TE).requires_grad_()
    dy = torch.randn(T, D, generator=generator)
    factors = torch.arange(1.0, E + 1)  # "expert" e multiplies by e + 1

    dispatcher = TokenDispatcher(te_reference, E, dist.group.WORLD)
    tokens, state = dispatcher.dispatch(x, weights, map_TE)
    e = E // ranks
    mine = factors[rank * e : (rank + 1) * e]
    assert torch.equal(tokens.map_Re.sum(0), tokens.tokens_per_expert_e) and tokens.num_pairs == tokens.map_Re.sum()
    assert (tokens.map_Re.sum(1) > 0).all()  # no row travels for nothing
    y = dispatcher.combine(tokens.rows_RD * (tokens.weights_Re * mine).sum(1, keepdim=True), state)
    y.backward(dy)

    scale = (weights.detach() * factors).sum(1, keepdim=True)
    errors = [
        (y - x * scale).abs().max(),
        (x.grad - dy * scale).abs().max(),
        (weights.grad - (x.detach() * dy).sum(1, keepdim=True) * factors * map_TE).abs().max(),
    ]
    return max(errors).item()


def test_dispatch_and_combine():
    for errors in run_on_ranks(_dispatch_all, 4):
        assert all(error < 1e-5 for error in errors.values()), errors


def _micro_batch(step: int, index: int, kind: str) -> dict[str, torch.Tensor]:
    """Micro-batches of unequal numbers of real tokens; after each token comes a fixed other one."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    starts = torch.randint(0, 60, (2, 1), generator=generator)
    ids = (starts + 7 * torch.arange(12)) % 60 + 1
    if kind == "one token":
        ids.fill_(7)  # every position routes alike: most experts and, with ep, most ranks get nothing
    mask = torch.ones_like(ids)
    mask[1, 3 + 2 * index :] = 0
    shifted = torch.full_like(ids, -100)
    shifted[:, :-1] = ids[:, 1:]
    shifted[:, :-1].masked_fill_(mask[:, 1:] == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "shift_labels": shifted}


def _train(
    dp: int,
    ep: int,
    steps: int,
    kind: str = "random",
    fields: dict | None = None,
    folder: str | None = None,
    start: int = 0,
) -> dict[str, list]:
    """Trains as train_fsdp2_ep does, on its own batches; with ``folder`` resumes from and saves to it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = TrainConfig(
        parallelism=ParallelismConfig(dp_size=dp, ep_size=ep),
        lr_scheduler_kwargs=SchedulerConfig(num_warmup_steps=2, num_decay_steps=30),
        te_backend="reference",
    )
    config.adamw_kwargs.lr = 3e-3
    model_config = NVMixtralConfig(**FIELDS | (fields or {}), te_backend="reference")
    device = torch.device("cpu")
    with torch.device("meta"):
        model = NVMixtralForCausalLM(model_config).train()
    shard(model, config, DistributedContext(rank, rank, world, device))
    initialize_weights(model, device, seed=1)
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, config, te_reference)
    scheduler = build_scheduler(optimizer, config.lr_scheduler_kwargs)
    if folder is not None:
        options = CheckpointConfig(ckpt_dir=folder, resume_from_checkpoint=True)
        checkpointer = Checkpointer(options, "test", model, optimizer, scheduler)
        if start:
            assert checkpointer.load().step == start
    log = {"loss": [], "norm": [], "load": []}
    for step in range(start + 1, start + steps + 1):
        batches = [_micro_batch(step, index, kind) for index in range(rank, MICRO_BATCHES, world)]
        targets = torch.tensor(float(sum((batch["shift_labels"] != -100).sum() for batch in batches)))
        dist.all_reduce(targets)
        loss, router = torch.zeros(()), RouterTotals(model_config, device)
        for index, batch in enumerate(batches):
            if world > 1:
                model.set_requires_gradient_sync(index == len(batches) - 1)
            output = model(**batch, num_items_in_batch=targets)
            output.loss.backward()
            loss += output.loss.detach()
            router.add(output)
        router.all_reduce()
        dist.all_reduce(loss)
        log["norm"].append(clip_and_step(optimizer, parameters, 1.0).item())
        scheduler.step()
        optimizer.zero_grad()
        model.update_router_bias(router.tokens_per_expert_LE)
        log["loss"].append(loss.item())
        log["load"].append(router.tokens_per_expert_LE.tolist())
    if folder is not None:
        checkpointer.save(start + steps, {})
        checkpointer.close()
    log["metrics"] = router.metrics()
    return log


def train(dp: int, ep: int, steps: int = 20, **kwargs) -> dict[str, list]:
    """Rank 0's log, after all ranks agreed on it."""
    logs = run_on_ranks(_train, dp * ep, dp, ep, steps, *kwargs.values(), timeout_seconds=120)
    assert all(log == logs[0] for log in logs)
    return logs[0]


@pytest.fixture(scope="module")
def one_process() -> dict[str, list]:
    return train(1, 1)


@pytest.mark.parametrize("dp, ep", [(1, 2), (1, 4), (2, 2), (4, 1)])
def test_every_layout_trains_alike(one_process, dp, ep):
    log = train(dp, ep)
    assert log["loss"] == pytest.approx(one_process["loss"], rel=1e-5)
    assert log["norm"] == pytest.approx(one_process["norm"], rel=1e-4)
    assert log["loss"][-1] < log["loss"][0] - 0.05


def test_metrics_count_every_real_token(one_process):
    metrics = one_process["metrics"]
    tokens = sum(int(_micro_batch(20, index, "random")["attention_mask"].sum()) for index in range(MICRO_BATCHES))
    assert [sum(layer) for layer in one_process["load"][-1]] == [A * tokens] * 2
    assert metrics["dropped_tokens"] == 0
    assert metrics["tokens_per_expert_min"] == [min(layer) for layer in one_process["load"][-1]]
    assert metrics["tokens_per_expert_max"] == [max(layer) for layer in one_process["load"][-1]]
    assert all(0 < entropy < torch.tensor(float(E)).log() for entropy in metrics["router_entropy"])
    assert 0.9 < metrics["aux_loss"] < E and json.dumps(metrics)


def test_ranks_and_experts_without_tokens():
    """Every token picks the same two experts in the first layer: at ep=4 at least two ranks process nothing."""
    alone, spread = (train(*layout, 4, kind="one token") for layout in ((1, 1), (1, 4)))
    idle = [sum(load == 0 for load in layer) for layer in spread["load"][0]]
    assert idle[0] == E - A
    assert spread["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert spread["norm"] == pytest.approx(alone["norm"], rel=1e-4)


def test_bias_balancing_and_padded_experts_do_not_depend_on_the_layout():
    fields = {"router_bias_update_rate": 0.02, "router_aux_loss_coef": 0.0, "expert_token_alignment": 16}
    alone, spread = (train(*layout, 6, kind="random", fields=fields) for layout in ((1, 1), (2, 2)))
    assert spread["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert spread["load"] == alone["load"]


def test_resumes_on_other_layouts(one_process, tmp_path):
    """EP 2 -> 1 -> 4 -> 2 x 2: weights, moments and schedule go on as if nothing had happened."""
    losses, start = [], 0
    for (dp, ep), steps in {(1, 2): 3, (1, 1): 3, (1, 4): 3, (2, 2): 3}.items():
        log = train(dp, ep, steps, kind="random", fields=None, folder=str(tmp_path), start=start)
        losses, start = losses + log["loss"], start + steps
    assert losses == pytest.approx(one_process["loss"][:12], rel=1e-5)


def _parameters(dp: int, ep: int) -> dict[str, tuple]:
    """Global and local shapes of the first layer's parameters."""
    with torch.device("meta"):
        model = NVMixtralForCausalLM(NVMixtralConfig(**FIELDS, te_backend="reference"))
    config = TrainConfig(parallelism=ParallelismConfig(dp_size=dp, ep_size=ep))
    shard(model, config, DistributedContext(dist.get_rank(), 0, dp * ep, torch.device("cpu")))
    return {name: (tuple(p.shape), tuple(p.to_local().shape)) for name, p in model.model.layers[0].named_parameters()}


def test_no_rank_holds_a_copy(tmp_path):
    """Dense parameters are cut over all four ranks, experts over ep and dp; names and global shapes stay."""
    for shapes in run_on_ranks(_parameters, 4, 2, 2):
        assert shapes["self_attention.proj.weight"] == ((32, 32), (8, 32))
        assert shapes["mlp.experts.fc1_weight"] == ((E, 96, 32), (E // 2, 48, 32))
        assert shapes["mlp.experts.fc2_weight"] == ((E, 32, 48), (E // 2, 16, 48))
        for name, (whole, local) in shapes.items():
            assert torch.Size(local).numel() * 4 == torch.Size(whole).numel(), name


def _initial_biases() -> torch.Tensor:
    with torch.device("meta"):
        model = NVMixtralForCausalLM(NVMixtralConfig(**FIELDS, router_bias_update_rate=0.1, te_backend="reference"))
    config = TrainConfig(parallelism=ParallelismConfig(dp_size=1, ep_size=2))
    shard(model, config, DistributedContext(dist.get_rank(), 0, 2, torch.device("cpu")))
    generator = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        initialize_weights(model, torch.device("cpu"), seed=1)
    assert torch.equal(torch.get_rng_state(), generator)
    return torch.stack([layer.mlp.gate.expert_bias for layer in model.model.layers])


def test_initial_weights_draw_nothing_from_the_ranks_generators():
    """A drawn DTensor would give all ranks one state, and with it the same stochastic rounding."""
    for biases_LE in run_on_ranks(_initial_biases, 2):
        assert torch.equal(biases_LE, torch.zeros(2, E))


def _mesh_neighbours() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    return dist.get_process_group_ranks(mesh["ep"].get_group())


def test_ep_groups_are_neighbours():
    assert run_on_ranks(_mesh_neighbours, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


OVERRIDES = [
    "--config-name=L0_sanity",
    "dataset.micro_batch_size=1",
    "dataset.max_seq_length=64",
    "dataset.num_workers=0",
    "validation.enabled=false",
    "checkpoint.save_every_n_steps=2",
    "checkpoint.resume_from_checkpoint=true",
]


def test_script_runs_resumes_elsewhere_and_logs(tmp_path):
    overrides = [*OVERRIDES, f"checkpoint.ckpt_dir={tmp_path}", "use_sequence_packing=true"]
    run_script("train_fsdp2_ep.py", [*overrides, "num_train_steps=2"], world_size=2)
    more = ["num_train_steps=4", "grad_acc_steps=2", "checkpoint.save_final_model=true"]
    run_script("train_fsdp2_ep.py", [*overrides, *more], world_size=1)
    lines = [json.loads(line) for line in (tmp_path / "train_fsdp2_ep/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["dropped_tokens"] == 0 and len(line["tokens_per_expert_cv"]) == 2 for line in lines)
    model = NVMixtralForCausalLM.from_pretrained(tmp_path / "train_fsdp2_ep/final_model")
    assert model.config.num_local_experts == E


@pytest.mark.parametrize(
    "sizes, world_size, message",
    [
        ({"dp_size": 2, "ep_size": 2}, 2, "dp_size * ep_size = 2 * 2 is not the world size 2"),
        ({"ep_size": 3}, 2, "3 ranks do not divide the world size 2"),
        ({"ep_size": 0}, 1, "ep_size=0 must be at least 1"),
        ({"dp_size": 0}, 1, "dp_size=0 must be at least 1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(sizes, world_size, message):
    problems = find_problems(TrainConfig(parallelism=ParallelismConfig(**sizes)), world_size)
    assert any(message in problem for problem in problems), problems


def test_layout_defaults():
    assert ParallelismConfig().sizes(8) == (1, 8)
    assert ParallelismConfig(ep_size=2).sizes(8) == (4, 2)
    assert ParallelismConfig(dp_size=4).sizes(8) == (4, 2)


@pytest.mark.parametrize("dp, ep, message", [(1, 3, "num_local_experts=8"), (5, 1, "hidden_size=32")])
def test_models_that_do_not_split_are_refused(dp, ep, message):
    config = SimpleNamespace(num_local_experts=8, hidden_size=32, intermediate_size=48)
    with pytest.raises(ValueError, match=message):
        check_layout(config, dp, ep)
