"""The schema and the validator: every rule is broken once, and every problem is reported at once."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

from config import load_config, register_schema, save_resolved
from errors import ConfigError
from paths import PROJECT_DIR


FP8_STATS = ("fp8_config.enabled=true", "quant_stats_config.enabled=true")


def compose_config(overrides=(), name="L0_sanity", family="llama", script="train_fsdp2", world_size=1):
    register_schema()
    with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT_DIR / "hydra_config" / family)):
        return load_config(compose(name, overrides=list(overrides)), script, world_size, list(overrides))


@pytest.mark.parametrize("path", sorted((PROJECT_DIR / "hydra_config" / "llama").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_is_valid(path):
    overrides = ["init_from_pretrained=./model_configs/llama-genome-tiny"] if path.stem == "L0_finetune" else []
    shared = path.stem.endswith("_cp")
    config = compose_config(
        overrides, path.stem, script="train_fsdp2_cp" if shared else "train_fsdp2", world_size=1 + 3 * shared
    )
    assert config.num_train_steps > 0


def test_unknown_key_is_an_error():
    with pytest.raises(ConfigCompositionException, match="num_train_step"):
        compose_config(["num_train_step=3"])
    with pytest.raises(ConfigError, match=r"dataset\.no_such_key is no key of the schema"):
        compose_config(["+dataset.no_such_key=3"])


def test_wrong_type_is_an_error():
    with pytest.raises(Exception, match="num_train_steps"):
        compose_config(["num_train_steps=many"])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["grad_acc_steps=0"], "grad_acc_steps=0 must be at least 1"),
        (["dataset.micro_batch_size=0"], "micro_batch_size=0"),
        (["use_sequence_packing=true", "dataset.token_micro_batch_size=0"], "token_micro_batch_size=0"),
        (["dataset.token_micro_batch_size=64"], "needs use_sequence_packing=true"),
        (["dataset.stride=5000"], "dataset.stride=5000"),
        (["dataset.num_workers=7"], "num_shards=48 must be at most 10^6 and a multiple"),
        (["te_backend=tpu"], "te_backend='tpu' is not one of"),
        (["dtype=float16"], "dtype='float16'"),
        (["config_name_or_path=./nowhere"], "no such file or folder"),
        (["init_from_pretrained=./nowhere"], "init_from_pretrained='./nowhere' is no folder with a config.json"),
        (["dataset.tokenizer_name_or_path=./nowhere"], "no such file or folder"),
        (["config_name_or_path=''"], "config_name_or_path='': no such file or folder"),
        (["dataset.tokenizer_name_or_path=''"], "dataset.tokenizer_name_or_path='': no such file or folder"),
        (["dataset.load_dataset_kwargs.path=''"], "dataset.load_dataset_kwargs.path='' names no data"),
        (["dataset.load_dataset_kwargs.path=null"], "dataset.load_dataset_kwargs.path=None names no data"),
        (["validation={enabled: true, load_dataset_kwargs: {path: ' '}}"], "load_dataset_kwargs.path=' ' names no"),
        (["quant_stats_config.quant_log_dir=''", *FP8_STATS], "quant_log_dir='' is empty"),
        (["checkpoint.ckpt_dir=c", "init_from_pretrained=c/train_fsdp2/final_model"], "own final model goes"),
        (["checkpoint.save_every_n_steps=5"], "needs checkpoint.ckpt_dir"),
        (["checkpoint.resume_from_checkpoint=true"], "needs checkpoint.ckpt_dir"),
        (["config_kwargs.attn_input_format=thd"], "contradicts use_sequence_packing=false"),
        (["use_sequence_packing=true", "config_kwargs.self_attn_mask_type=causal"], "must be padding_causal"),
        (["+config_kwargs.te_backend=reference"], "the run's own key is te_backend (te_backend=auto). Set that one"),
        (["+config_kwargs.activation_checkpointing=full"], "the run's own key is activation_checkpointing"),
        (["+config_kwargs.torch_dtype=bfloat16"], "config_kwargs.torch_dtype='bfloat16' would have no effect"),
        (["+config_kwargs.model_type=llama"], "the run's own key is config_name_or_path"),
        (["use_te=false", "use_sequence_packing=true"], "use_te=false"),
        (["activation_checkpointing=most"], "activation_checkpointing='most'"),
        (["use_te=false", "activation_checkpointing=2"], "recomputes all layers or none"),
        (["use_te=false", "te_backend=reference"], "no meaning with use_te=false"),
        (["adamw_kwargs.lr=0"], "adamw_kwargs.lr=0"),
        (["adamw_kwargs.betas=[0.9]"], "two numbers"),
        (["lr_scheduler_kwargs.min_lr_ratio=2"], "min_lr_ratio=2"),
        (["profiler.enabled=true", "profiler.start_step=5", "profiler.end_step=4"], "profiler.start_step=5"),
        (["validation.every_n_steps=3", "validation.enabled=false"], "every_n_steps=3 would be ignored"),
        (["hsdp_replicate_size=2"], "does not divide the world size 1"),
        (
            [
                "checkpoint.ckpt_dir=x",
                "checkpoint.save_every_n_steps=1",
                "dataset.use_stateful_dataloader=false",
            ],
            "would lose the position in the data",
        ),
    ],
)
def test_broken_rule_names_value_rule_and_fix(overrides, message):
    with pytest.raises(ConfigError) as error:
        compose_config(overrides)
    assert message in str(error.value)


def test_every_problem_is_reported_at_once():
    with pytest.raises(ConfigError) as error:
        compose_config(["grad_acc_steps=0", "dtype=float16", "te_backend=tpu"])
    assert len(error.value.problems) == 3


def test_a_key_that_the_script_would_ignore_is_refused():
    with pytest.raises(ConfigError, match="train_ddp would ignore it"):
        compose_config(["hsdp_replicate_size=2"], script="train_ddp", world_size=2)


def test_a_preset_may_carry_a_key_of_another_script():
    assert compose_config(name="L2_lingua_70b", script="train_fsdp2_cp", world_size=32).cp_size == 2
    assert compose_config(name="L2_lingua_70b", script="train_fsdp2", world_size=32).cp_size == 1


def test_resolved_config_is_complete(tmp_path):
    config = compose_config(["config_kwargs.attn_input_format=bshd"])
    save_resolved(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "num_shards: 48" in text and "attn_input_format: bshd" in text


def test_outputs_below_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    paths = ["checkpoint.ckpt_dir='~/ckpt'", "logger.metrics_path='~/m.jsonl'"]
    paths.append("quant_stats_config.quant_log_dir='~/stats'")
    config = compose_config([*paths, "quant_stats_config.enabled=true", "fp8_config.enabled=true"])
    assert config.checkpoint.ckpt_dir == "/home/someone/ckpt"
    assert config.logger.metrics_path == "/home/someone/m.jsonl"
    assert config.quant_stats_config.quant_log_dir == "/home/someone/stats"


def test_a_preset_that_needs_a_value_says_which():
    with pytest.raises(
        ConfigError, match="config_name_or_path takes the value of init_from_pretrained, which has none"
    ):
        compose_config([], name="L0_finetune")


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "dataset.tokenizer_name_or_path=${init_from_pretrained}",
            r"dataset\.tokenizer_name_or_path takes the value of init_from_pretrained, which has none",
        ),
        (
            "adamw_kwargs.betas=[0.9, '${init_from_pretrained}']",
            r"adamw_kwargs\.betas\[1\] takes the value of init_from",
        ),
        ("num_train_steps=${dtype}", "num_train_steps: .*'auto' of type 'str' could not be converted to Integer"),
        ("dataset.text_column=${dataset.nope}", r"dataset\.text_column: Interpolation key 'dataset\.nope' not found"),
        ("dataset.text_column=???", r"dataset\.text_column: .* missing mandatory value"),
    ],
)
def test_interpolations_that_lead_nowhere(override, message):
    with pytest.raises(ConfigError, match=message):
        compose_config([override])
