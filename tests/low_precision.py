"""A small training run in some precision and layout, for tests: the scripts' own pieces around synthetic batches."""

import torch
import torch.distributed as dist

import te_backend
from checkpoint import Checkpointer
from config import AdamWConfig, CheckpointConfig, DatasetConfig, SchedulerConfig, TrainConfig
from config_low_precision import FP4_RECIPES, FP4Config, FP8Config, QuantizedModelInitConfig
from distributed import DistributedContext, all_reduce_sum, own_rank
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM
from modeling_mixtral_te import NVMixtralConfig, NVMixtralForCausalLM
from optimizer import build_optimizer, clip_and_step
from quantization import plan_precision
from scheduler import build_scheduler
from train_ddp import replicate
from train_fsdp2 import shard
from train_fsdp2_ep import shard as shard_mixtral
from training import build_model
from weight_init import initialize_weights


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
TOKENS = 32


def make_config(
    recipe: str | None = None,
    qinit: bool = False,
    preserve: bool = False,
    folder: str | None = None,
    lr: float = 1e-2,
    **options,
) -> TrainConfig:
    """A config whose layers all run in ``recipe`` (None: high precision).

    Without clipping: AdamW and FusedAdam clip in different places, and so round differently.
    """
    options.setdefault("max_grad_norm", 0.0)
    fp4 = recipe in FP4_RECIPES
    options.setdefault("config_kwargs", {})
    if qinit and fp4:
        options["config_kwargs"] = {"use_quantized_model_init": True}
    fp8_config = FP8Config(
        enabled=recipe is not None and not fp4,
        fp8_recipe=recipe if recipe and not fp4 else "DelayedScaling",
        quantized_model_init_kwargs=QuantizedModelInitConfig(qinit and not fp4, preserve),
    )
    return TrainConfig(
        te_backend=options.pop("te_backend", "reference"),
        fp8_config=fp8_config,
        fp4_config=FP4Config(enabled=fp4),
        dataset=DatasetConfig(load_dataset_kwargs={"path": "unused"}),
        adamw_kwargs=AdamWConfig(lr=lr),
        lr_scheduler_kwargs=SchedulerConfig(num_warmup_steps=1, num_decay_steps=20),
        checkpoint=CheckpointConfig(ckpt_dir=folder, resume_from_checkpoint=folder is not None),
        **options,
    )


class Run:
    """What a train script holds, with ``layout`` plain, ddp, fsdp2, or ep: a Mixtral over ``config.parallelism``."""

    def __init__(self, config: TrainConfig, layout: str = "plain", shape: dict = SHAPE, device: str = "cpu"):
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = own_rank()
        self.config, self.world_size = config, world_size
        ctx = DistributedContext(self.rank, self.rank, world_size, torch.device(device))
        self.device = device
        fields = {"te_backend": config.te_backend, "activation_checkpointing": config.activation_checkpointing}
        if layout == "ep":
            model_class, model_config = NVMixtralForCausalLM, NVMixtralConfig(**EXPERTS | shape | fields)
            shards, expert_shards = world_size, config.parallelism.sizes(world_size)[0]
        else:
            model_class, model_config = NVLlamaForCausalLM, NVLlamaConfig(**shape | fields)
            shards, expert_shards = world_size if layout == "fsdp2" else 1, None
        self.precision = plan_precision(config, model_config, ctx.device, shards, expert_shards)
        self.model = build_model(config, model_config, ctx.device, model_class, self.precision)
        if layout == "fsdp2":
            shard(self.model, config, ctx)
        elif layout == "ep":
            shard_mixtral(self.model, config, ctx)
        initialize_weights(self.model, ctx.device, 3, config.init_from_pretrained)
        if layout == "ddp":
            self.model = replicate(self.model, ctx)
        self.layout = layout
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(self.model, config, te_backend.resolve(config.te_backend))
        self.scheduler = build_scheduler(self.optimizer, config.lr_scheduler_kwargs)
        self.checkpointer = Checkpointer(config.checkpoint, "train_x", self.model, self.optimizer, self.scheduler)
        torch.manual_seed(1)  # stochastic rounding

    def batch(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        first = torch.randint(64, (2, 1), generator=generator)
        tokens = (first + 3 * torch.arange(TOKENS // 2)) % 64  # every token follows from the one before
        batch = {"input_ids": tokens, "shift_labels": tokens.roll(-1, dims=1)}
        return {key: value.to(self.device) for key, value in batch.items()}

    def train(self, first: int, last: int) -> list[float]:
        """The losses of steps ``first`` to ``last``; one micro-batch per step and rank, its loss a mean over all."""
        losses = []
        for step in range(first, last + 1):
            loss = self.model(**self.batch(step, self.rank), num_items_in_batch=TOKENS * self.world_size).loss
            loss.backward()
            clip_and_step(self.optimizer, self.parameters, self.config.max_grad_norm)
            self.scheduler.step()
            self.optimizer.zero_grad()
            loss = loss.detach()
            losses.append(all_reduce_sum(loss).item() if dist.is_initialized() else loss.item())
        return losses
