"""Pre-trains Llama 3 on long sequences: FSDP2, and context parallelism (cp_size ranks share every sequence).

    python train_fsdp2_cp.py --config-name L0_sanity_cp cp_size=1                   # one process
    torchrun --nproc_per_node=4 train_fsdp2_cp.py --config-name L0_sanity_cp        # two groups of two ranks
    torchrun --nproc_per_node=8 train_fsdp2_cp.py --config-name L1_1b_131k_cp       # 131,072 tokens, two groups of four

Options: the YAML files in hydra_config/llama; every key is documented in config.py, the layout in context_parallel.py.
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
from context_parallel import init_context_parallel, set_context_parallel_group
from dataset import load_tokenizer
from distributed import DistributedContext, all_reduce_sum, errors_once, init_distributed, shut_down, sum_gradients
from export import save_final_model
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
    """Shards every decoder layer, then the rest (embedding, norm, head), in place. One process has nothing to shard.

    Over all ranks, whatever their place in the (dp, cp) mesh: those of a context-parallel group need each other's
    parameters and gradients as much as those of other groups.
    """
    if ctx.world_size == 1:
        return
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,), mesh_dim_names=("shard",))
    # Gradients are summed in FP32. Inputs are not cast: the RoPE table must stay FP32.
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)}
    reshard = config.reshard_after_forward
    layers: list[FSDPModule] = [
        fully_shard(layer, reshard_after_forward=reshard, **options) for layer in model.model.layers
    ]
    fully_shard(model, **options)
    sum_gradients(model)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])


@hydra.main(version_base="1.3", config_path="hydra_config/llama", config_name="defaults")
@errors_once
def main(cfg: DictConfig) -> None:
    # 1. Processes, configuration.
    ctx = init_distributed()
    config = load_config(cfg, script="train_fsdp2_cp")
    torch.manual_seed(config.seed + ctx.rank)  # stochastic rounding; data and weights have generators of their own
    run_dir = run_folder(config, "train_fsdp2_cp")

    # 2. Tokenizer, precision, data: the ranks of a context-parallel group read the same batches, and each keeps its
    #    chunks of every sequence.
    tokenizer = load_tokenizer(config.dataset.tokenizer_name_or_path)
    model_config = build_model_config(config, tokenizer)
    heads = model_config.num_attention_heads, model_config.num_key_value_heads
    cp = init_context_parallel(ctx, config.cp_size, config.cp_comm_type, *heads)
    precision = plan_precision(config, model_config, ctx.device, num_shards=ctx.world_size)
    loader, validation = build_loaders(config, tokenizer, ctx, precision.pad_to_multiple, cp)

    # 3. Model, optimiser.
    statistics = start_statistics(config, precision, model_config, run_dir)
    model = build_model(config, model_config, ctx.device, precision=precision)
    set_context_parallel_group(model, cp, ctx.device)
    shard(model, config, ctx)
    initialize_weights(model, ctx.device, config.seed, config.init_from_pretrained)
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, config, te_backend.resolve(config.te_backend))
    scheduler = build_scheduler(optimizer, config.lr_scheduler_kwargs)

    # 4. Resume.
    checkpointer = Checkpointer(config.checkpoint, "train_fsdp2_cp", model, optimizer, scheduler)
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
            batch = next_global_batch(
                batches, config.grad_acc_steps, ctx.device, preemption.signalled, cp.cp_rank, cp.cp_size
            )
            loss = torch.zeros((), device=ctx.device)
            for index, micro_batch in enumerate(batch.micro_batches):
                if ctx.world_size > 1:  # reduce the gradients once, after the last micro-batch
                    model.set_requires_gradient_sync(index == config.grad_acc_steps - 1)
                micro_loss = model(**micro_batch, num_items_in_batch=batch.num_targets).loss
                with phase("backward"):
                    micro_loss.backward()  # a sum over ranks, as the gradients are: sum_gradients
                loss += micro_loss.detach()
            learning_rate = optimizer.param_groups[0]["lr"]
            grad_norm = clip_and_step(optimizer, parameters, config.max_grad_norm)
            scheduler.step()
            optimizer.zero_grad()
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
