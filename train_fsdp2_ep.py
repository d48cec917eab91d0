"""Pre-trains Mixtral with expert parallelism: experts spread over ep ranks, everything sharded by FSDP2.

    python train_fsdp2_ep.py --config-name L0_sanity                               # one process holds every expert
    torchrun --nproc_per_node=2 train_fsdp2_ep.py --config-name L0_sanity          # each rank holds half of them
    torchrun --nproc_per_node=4 train_fsdp2_ep.py --config-name L0_sanity parallelism.dp_size=2 parallelism.ep_size=2
    torchrun --nproc_per_node=8 train_fsdp2_ep.py --config-name L1_8x7B_ep

Every rank reads its own data. How tokens reach their experts, and how gradients add up: expert_parallel.py.
Options: the YAML files in hydra_config/mixtral; every key is documented in config.py.
"""

import logging
from contextlib import closing
from itertools import pairwise

import hydra
import torch
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import te_backend
from checkpoint import Checkpointer
from config import TrainConfig, load_config, register_schema
from dataset import load_tokenizer
from distributed import DistributedContext, all_reduce_sum, errors_once, init_distributed, shut_down, sum_gradients
from expert_parallel import check_layout, expert_blocks, fsdp_placement, shard_experts
from export import save_final_model
from mixture_of_experts import RouterTotals
from modeling_mixtral_te import NVMixtralConfig, NVMixtralForCausalLM
from optimizer import build_optimizer, clip_and_step
from perf_logger import PerfLogger, run_folder
from phases import phase
from preemption import Preemption
from quantization import plan_precision
from quantization_stats import start_statistics
from scheduler import build_scheduler
from training import (
    build_loaders,
    build_model,
    build_model_config,
    is_due,
    next_global_batch,
    rank_state,
    restore,
    saves_after,
    validate,
)
from weight_init import initialize_weights


logger = logging.getLogger(__name__)
register_schema()
preemption = Preemption()


def shard(model: nn.Module, config: TrainConfig, ctx: DistributedContext) -> None:
    """Experts over ep and then dp; everything else over all ranks, layer by layer; in place."""
    if ctx.world_size == 1:
        return
    dp_size, ep_size = config.parallelism.sizes(ctx.world_size)
    world_mesh = init_device_mesh(ctx.device.type, (ctx.world_size,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(ctx.device.type, (dp_size, ep_size), mesh_dim_names=("dp", "ep"))
    shard_experts(model, mesh)

    # Gradients are summed in FP32. Inputs are not cast: the RoPE table and the router's weights must stay FP32.
    options = {
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
        "shard_placement_fn": fsdp_placement,
    }
    reshard = config.reshard_after_forward
    whole: set[nn.Parameter] = set()
    modules: list[FSDPModule] = []  # in the order of the forward pass
    for layer, block in zip(model.model.layers, expert_blocks(model), strict=True):
        experts = []
        if ep_size > 1 and dp_size > 1:
            experts = [fully_shard(block.experts, mesh=mesh["dp"], reshard_after_forward=reshard, **options)]
        elif ep_size > 1:  # each expert is whole on its rank: FSDP has nothing to do with it
            whole.update(block.experts.parameters())
        modules.append(
            fully_shard(layer, mesh=world_mesh, reshard_after_forward=reshard, ignored_params=whole, **options)
        )
        modules += experts
    fully_shard(model, mesh=world_mesh, ignored_params=whole, **options)
    sum_gradients(model)
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])


@hydra.main(version_base="1.3", config_path="hydra_config/mixtral", config_name="defaults")
@errors_once
def main(cfg: DictConfig) -> None:
    # 1. Processes, configuration.
    ctx = init_distributed()
    config = load_config(cfg, script="train_fsdp2_ep")
    torch.manual_seed(config.seed + ctx.rank)  # stochastic rounding; data and weights have generators of their own
    run_dir = run_folder(config, "train_fsdp2_ep")

    # 2. Tokenizer, precision, data: every rank reads its own part.
    tokenizer = load_tokenizer(config.dataset.tokenizer_name_or_path)
    model_config = build_model_config(config, tokenizer, NVMixtralConfig)
    dp_size, ep_size = config.parallelism.sizes(ctx.world_size)
    check_layout(model_config, dp_size, ep_size)
    precision = plan_precision(config, model_config, ctx.device, ctx.world_size, num_expert_shards=dp_size)
    loader, validation = build_loaders(config, tokenizer, ctx, precision.pad_to_multiple)

    # 3. Model, optimiser.
    statistics = start_statistics(config, precision, model_config, run_dir)
    model = build_model(config, model_config, ctx.device, NVMixtralForCausalLM, precision)
    shard(model, config, ctx)
    initialize_weights(model, ctx.device, config.seed, config.init_from_pretrained)
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, config, te_backend.resolve(config.te_backend))
    scheduler = build_scheduler(optimizer, config.lr_scheduler_kwargs)

    # 4. Resume.
    checkpointer = Checkpointer(config.checkpoint, "train_fsdp2_ep", model, optimizer, scheduler)
    loaded = checkpointer.load() if config.checkpoint.resume_from_checkpoint else None
    start_step, consumed_tokens = restore(loaded, loader, config.num_train_steps, ctx)

    # 5. Train.
    statistics.attach(model, start_step)
    batches = iter(loader)
    perf = PerfLogger(config, run_dir, ctx, model_config, start_step, consumed_tokens)
    with closing(loader), closing(perf), closing(statistics):
        preemption.arm(config, ctx)  # SIGTERM and SIGUSR1 now end the run after a step, with a checkpoint
        for step in range(start_step + 1, config.num_train_steps + 1):
            perf.start_step(step)
            batch = next_global_batch(batches, config.grad_acc_steps, ctx.device, preemption.signalled)
            loss = torch.zeros((), device=ctx.device)
            router = RouterTotals(model_config, ctx.device)
            for index, micro_batch in enumerate(batch.micro_batches):
                if ctx.world_size > 1:  # reduce the gradients once, after the last micro-batch
                    model.set_requires_gradient_sync(index == config.grad_acc_steps - 1)
                output = model(**micro_batch, num_items_in_batch=batch.num_targets)
                with phase("backward"):
                    output.loss.backward()  # a sum over ranks, as the gradients are: sum_gradients
                loss += output.lm_loss.detach()
                router.add(output)
            router.all_reduce()
            learning_rate = optimizer.param_groups[0]["lr"]
            grad_norm = clip_and_step(optimizer, parameters, config.max_grad_norm)
            scheduler.step()
            optimizer.zero_grad()
            model.update_router_bias(router.tokens_per_expert_LE)
            statistics.step()

            # 6. Validate, log, save.
            validation_loss = None
            if validation is not None and is_due(step, config.validation.every_n_steps, config.num_train_steps):
                with perf.untimed(), phase("validation"):
                    validation_loss = validate(model, validation, ctx.device, batch.micro_batches[-1])
            perf.log_step(
                step,
                loss=all_reduce_sum(loss),
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                epoch=batch.epoch,
                num_tokens=batch.num_tokens,
                num_unpadded_tokens=batch.num_unpadded_tokens,
                sum_seq_len_squared=batch.sum_seq_len_squared,
                validation_loss=validation_loss,
                more_metrics=router.metrics,
            )
            preempted = preemption.stops_after(step, batch.signalled_ranks)
            if saves_after(step, config, preempted):
                with perf.saving(), phase("checkpoint"):
                    checkpointer.save(step, rank_state(loader, perf.rank_consumed_tokens, ctx.device))
            if preempted:
                break

    # 7. Finish.
    checkpointer.close()
    if config.checkpoint.save_final_model and not preemption.left_early:
        save_final_model(model, tokenizer, checkpointer.directory / "final_model")


if __name__ == "__main__":
    main()
    shut_down(preemption.exit_status)
