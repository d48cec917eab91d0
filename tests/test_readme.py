"""The README's commands run, or say which hardware they need; its file tree is the folder's.

Commands stand in code blocks only. Those without a ``needs ...`` comment are run here, in the README's order and in one
folder, with one training step on short batches and otherwise as they are; the others that train are valid
configurations. Installing and ``pytest`` itself is what ``.ci/run`` does.
"""

import gc
import gzip
import os
import re
import runpy
import shlex
import sys

import pytest
from hydra import compose, initialize_config_dir

import distributed
from config import load_config, register_schema
from dist_utils import run_on_ranks
from paths import PROJECT_DIR


README = (PROJECT_DIR / "README.md").read_text()
CODE_BLOCKS = re.findall(r"^```\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
PROGRAMS = r"(?:python|torchrun|pip|pytest|docker|sbatch|kubectl|sky|nsys|bash|\./)\S*"
NEEDS = re.compile(r"needs .*(Docker|GPU|Slurm|Kubernetes|SkyPilot)")


def commands():
    """(command, comment), the parts of ``a && b`` one by one."""
    found = []
    for line in "".join(CODE_BLOCKS).replace("\\\n", "").splitlines():
        if re.match(PROGRAMS + r"(\s|$)", line):
            command, _, comment = line.partition(" #")
            found += [(part.strip(), comment) for part in command.split("&&")]
    return found


CI_COMMANDS = ["pip install -r requirements.txt", "pytest"]
UNMARKED = [command for command, comment in commands() if not NEEDS.search(comment)]
HERE = [command for command in UNMARKED if command not in CI_COMMANDS]
ELSEWHERE = [command for command, comment in commands() if NEEDS.search(comment)]


def test_commands_are_found_and_in_code_blocks():
    assert len(HERE) > 20
    assert len(ELSEWHERE) > 7
    assert (
        README.splitlines().index("pip install -r requirements.txt && python train_fsdp2.py      # the main job") < 30
    )
    prose = re.sub(r"^```\n.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(rf"`{PROGRAMS}\s[^`]*`", prose) == []


def test_ci_installs_and_tests():
    assert set(CI_COMMANDS) <= set(UNMARKED)
    ci = (PROJECT_DIR / ".ci" / "run").read_text().replace(" --quiet", "").splitlines()
    assert set(CI_COMMANDS) <= set(ci)


@pytest.mark.parametrize("command", [c for c in ELSEWHERE if re.search(r"\btrain_\w+\.py", c)])
def test_training_command_that_needs_hardware_is_valid(command):
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


@pytest.mark.parametrize("command", [c for c in ELSEWHERE if " deploy/" in c])
def test_files_of_commands_that_need_hardware_exist(command):
    assert (PROJECT_DIR / shlex.split(command)[-1]).is_file()


def run_script_here(script, argv, folder):
    """As ``python script argv`` in ``folder``, in this process, which leaves its process group but lives on."""
    os.chdir(folder)
    sys.argv = [script, *argv]
    sys.path.insert(0, str((PROJECT_DIR / script).parent))
    distributed.shut_down = lambda exit_status=0: None
    try:
        runpy.run_path(str(PROJECT_DIR / script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    gc.collect()  # a DDP model must go before its group
    distributed.leave_group()


def test_commands_run(tmp_path):
    bases = "ACGT" * 5000
    (tmp_path / "my.fna.gz").write_bytes(gzip.compress(f">chromosome\n{bases}\n".encode()))
    for command in dict.fromkeys(HERE):
        program, *words = shlex.split(command)
        ranks = 1
        if program == "torchrun":
            ranks = int(words.pop(0).removeprefix("--nproc_per_node="))
        script, *argv = words
        if script.startswith("train_"):
            steps = 2 if "checkpoint.resume_from_checkpoint=true" in argv else 1
            argv = [word for word in argv if not word.startswith("num_train_steps=")]
            argv += [f"num_train_steps={steps}", "validation.max_batches=1", "dataset.micro_batch_size=2"]
            argv.append("profiler.start_step=1")
        try:
            run_on_ranks(run_script_here, ranks, script, argv, str(tmp_path), init=False)
        except AssertionError as error:
            raise AssertionError(f"{command}\n{error}") from error
    made = {path.name for path in tmp_path.iterdir()}
    assert made >= {"ckpt", "hf_model", "te_model", "my_data", "plot_run.png", "plot_run.html", "logs", "outputs"}


def test_every_module_is_in_the_file_tree_and_only_those():
    listed = set(re.findall(r"\b(\w+\.py)\b", README))
    modules = {path.name for path in PROJECT_DIR.glob("*.py")}
    globbed = {name for name in modules if name.startswith("quantization_stats")}  # quantization_stats*.py
    assert modules - globbed <= listed, modules - globbed - listed
    elsewhere = {path.name for path in PROJECT_DIR.rglob("*.py")}
    assert listed <= elsewhere, listed - elsewhere
