"""The README's training commands are valid configurations, and its file tree is the folder's."""

import re
import shlex

import pytest
from hydra import compose, initialize_config_dir

from config import load_config, register_schema
from paths import PROJECT_DIR


README = (PROJECT_DIR / "README.md").read_text()
CODE_BLOCKS = re.findall(r"```\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split(" #")[0].split("&& ")[-1].strip()
    for block in CODE_BLOCKS
    for line in block.splitlines()
    if re.search(r"\btrain_\w+\.py", line) and line.startswith(("python", "torchrun", "pip"))
]


@pytest.mark.parametrize("command", COMMANDS)
def test_training_command_is_valid(command):
    words = shlex.split(command)
    script = next(word for word in words if word.startswith("train_"))
    argv = words[words.index(script) + 1 :]
    ranks = next((int(word.split("=")[1]) for word in words if word.startswith("--nproc_per_node=")), 1)
    name = argv[argv.index("--config-name") + 1] if "--config-name" in argv else "defaults"
    overrides = [word for word in argv if "=" in word]
    family = "mixtral" if script == "train_fsdp2_ep.py" else "llama"
    register_schema()
    with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT_DIR / "hydra_config" / family)):
        config = load_config(compose(name, overrides=overrides), script.removesuffix(".py"), ranks, overrides)
    assert config.num_train_steps > 0


def test_there_are_commands():
    assert len(COMMANDS) > 12
    assert (
        README.splitlines().index("pip install -r requirements.txt && python train_fsdp2.py      # the main job") < 30
    )


def test_every_module_is_in_the_file_tree_and_only_those():
    listed = set(re.findall(r"\b(\w+\.py)\b", README))
    modules = {path.name for path in PROJECT_DIR.glob("*.py")}
    globbed = {name for name in modules if name.startswith("quantization_stats")}  # quantization_stats*.py
    assert modules - globbed <= listed, modules - globbed - listed
    elsewhere = {path.name for path in PROJECT_DIR.rglob("*.py")}
    assert listed <= elsewhere, listed - elsewhere
