"""Containers and job files: linted, checked against their schemas, their scripts run with a faked scheduler.

No image is built here and no cluster asked. What is real: the shells, torchrun, its rendezvous and its signals.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import jsonschema
import pytest
import yaml
from hydra import compose, initialize_config_dir
from kubeflow_trainer_api import models
from torch.distributed.run import get_args_parser

from config import load_config, register_schema
from dist_utils import free_port
from paths import PROJECT_DIR


DEPLOY = PROJECT_DIR / "deploy"
SCHEMAS = Path(__file__).with_name("schemas")
TOOLS = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])  # also where no environment is active
RUNTIME, TRAIN_JOB = yaml.safe_load_all((DEPLOY / "kubernetes_train.yaml").read_text())
POD = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
SKY_TASK = yaml.safe_load((DEPLOY / "skypilot_train.yaml").read_text())
SCRIPTS = {
    "slurm": (DEPLOY / "slurm_train.sh").read_text(),
    "kubernetes": POD["containers"][0]["args"][0],
    "skypilot": SKY_TASK["run"],
}


def instructions(dockerfile):
    """(instruction, rest) of a Dockerfile, comments left out and continued lines joined."""
    lines = [line for line in (PROJECT_DIR / dockerfile).read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]


# --- Linters and schemas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.cpu"])
def test_hadolint(dockerfile):
    done = subprocess.run(
        [shutil.which("hadolint", path=TOOLS), PROJECT_DIR / dockerfile], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [*SCRIPTS, "ci"])
def test_shellcheck(name):
    script = SCRIPTS.get(name) or (PROJECT_DIR / ".ci" / "run").read_text()
    command = [shutil.which("shellcheck", path=TOOLS), "--shell=bash", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "document, kind", [(RUNTIME, models.TrainerV1alpha1TrainingRuntime), (TRAIN_JOB, models.TrainerV1alpha1TrainJob)]
)
def test_kubernetes_schema(document, kind):
    """Kubeflow's own models check the types and drop what they do not know."""
    assert kind.from_dict(document).to_dict() == document
    assert document["kind"] == kind.__name__.removeprefix("TrainerV1alpha1")


def test_kubernetes_job_uses_the_runtime():
    assert TRAIN_JOB["spec"]["runtimeRef"] == {"kind": RUNTIME["kind"], "name": RUNTIME["metadata"]["name"]}
    volumes = {volume["name"] for volume in POD["volumes"]}
    assert {mount["name"] for mount in POD["containers"][0]["volumeMounts"]} == volumes


@pytest.mark.parametrize(
    "schema, path",
    [
        ("skypilot_task", DEPLOY / "skypilot_train.yaml"),
        ("devcontainer", PROJECT_DIR / ".devcontainer" / "gpu" / "devcontainer.json"),
        ("devcontainer", PROJECT_DIR / ".devcontainer" / "cpu" / "devcontainer.json"),
    ],
)
def test_schema(schema, path):
    schema = json.loads((SCHEMAS / f"{schema}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    document = yaml.safe_load(path.read_text())  # of which JSON is a part
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"unknown": 1}, schema)


# --- Containers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder, dockerfile", [("gpu", "Dockerfile"), ("cpu", "Dockerfile.cpu")])
def test_devcontainer_is_the_image_with_the_folder_mounted(folder, dockerfile):
    path = PROJECT_DIR / ".devcontainer" / folder / "devcontainer.json"
    config = json.loads(path.read_text())
    assert (path.parent / config["build"]["dockerfile"]).resolve() == PROJECT_DIR / dockerfile
    assert (path.parent / config["build"]["context"]).resolve() == PROJECT_DIR
    (workdir,) = [rest for instruction, rest in instructions(dockerfile) if instruction == "WORKDIR"]
    assert config["workspaceFolder"] == workdir
    assert f"target={workdir}," in config["workspaceMount"]
    assert f":{workdir} " in (PROJECT_DIR / dockerfile).read_text()  # docker run -v


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.cpu"])
def test_editing_code_rebuilds_nothing(dockerfile):
    copied = [word for name, rest in instructions(dockerfile) if name == "COPY" for word in rest.split()[:-1]]
    assert copied
    sent = [line[1:] for line in (PROJECT_DIR / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert set(copied) <= set(sent)
    assert all(name.startswith("requirements") for name in sent)


def test_cpu_image_installs_what_ci_installs():
    """CI runs that line in a bare virtual environment, and the tests in it."""
    (pip,) = [rest for name, rest in instructions("Dockerfile.cpu") if name == "RUN" and "pip install" in rest]
    ci = (PROJECT_DIR / ".ci" / "run").read_text().replace("--quiet ", "").splitlines()
    assert pip.replace("--no-cache-dir ", "") in ci


BASE_IMAGE_PACKAGES = """\
flash_attn==2.7.4.post1
numpy==2.1.0
pytorch-triton==3.5.0+gitdfdf
torch==2.13.0a0+1b2c3d4.nv26.10
torchvision==0.28.0a0
transformer_engine==2.20.0+1a2b3c4
triton==3.5.0
"""


@pytest.fixture
def gpu_image_lines(tmp_path):
    """The RUN lines of Dockerfile with /opt in a temporary folder and pip a stranger, and what they write there."""
    fake_tool(tmp_path, "pip", f'[ "$1" = list ] && cat <<< "{BASE_IMAGE_PACKAGES}" || echo "pip $*"')
    fake_tool(tmp_path, "python", "")
    for name in ("requirements.txt", "requirements-gpu.txt"):
        shutil.copy(PROJECT_DIR / name, tmp_path)
    for name, rest in instructions("Dockerfile"):
        if name == "RUN":
            run_bash(rest.replace("/opt/", f"{tmp_path}/"), tmp_path)
    return tmp_path


def test_gpu_image_keeps_nvidias_torch_and_transformer_engine(gpu_image_lines):
    kept = (gpu_image_lines / "constraints.txt").read_text().split()
    names = ["flash_attn", "pytorch-triton", "torch", "transformer_engine", "triton"]
    assert [line.split("==")[0] for line in kept] == names
    asked_for = (gpu_image_lines / "others.txt").read_text()
    names = {re.split(r"[\[<>= ]", line)[0] for line in asked_for.splitlines() if line and not line.startswith("#")}
    every = "\n".join((PROJECT_DIR / name).read_text() for name in ("requirements.txt", "requirements-gpu.txt"))
    expected = {re.split(r"[\[<>= ]", line)[0] for line in every.splitlines() if line and line[0] not in "#-"}
    assert names == expected - {"torch", "transformer-engine"}
    assert {"torchdata", "nvdlfw-inspect"} <= names
    environment = dict(rest.split("=") for name, rest in instructions("Dockerfile") if name == "ENV")
    assert environment == {"PIP_CONSTRAINT": "/opt/constraints.txt"}


# --- Jobs -------------------------------------------------------------------------------------------------------------


def fake_tool(folder, name, script):
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def run_bash(script, folder, **environment):
    environment = os.environ | {"PATH": f"{folder}/bin{os.pathsep}{TOOLS}"} | environment
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun_arguments(folder, platform):
    """torchrun's own reading of what a job's script gives it on the second of two nodes with four GPUs each."""
    fake_tool(folder, "torchrun", f'printf "%s\\n" "$@" > {folder}/argv')
    fake_tool(folder, "srun", 'while [ "$1" != torchrun ]; do shift; done; "$@"')
    fake_tool(folder, "scontrol", '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"')
    nodes = {
        "slurm": {
            "SLURM_JOB_ID": "123",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "4",
        },
        "kubernetes": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node7", "PET_MASTER_PORT": "29500"},
        "skypilot": {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NODE_IPS": "node7\nnode8",
            "SKYPILOT_NUM_GPUS_PER_NODE": "4",
            "SKYPILOT_TASK_ID": "123",
        },
    }
    script = SCRIPTS[platform].replace("SHARED=/shared", f"SHARED={folder}/shared")
    run_bash(script, folder, **nodes[platform])
    return get_args_parser().parse_args((folder / "argv").read_text().splitlines())


@pytest.mark.parametrize("platform", SCRIPTS)
def test_what_torchrun_gets(tmp_path, platform):
    arguments = torchrun_arguments(tmp_path, platform)
    assert (arguments.nnodes, arguments.rdzv_backend) == ("2", "c10d")
    assert arguments.nproc_per_node == ("gpu" if platform == "kubernetes" else "4")
    assert re.fullmatch(r"node7:2\d{4}", arguments.rdzv_endpoint)
    assert arguments.rdzv_id
    assert arguments.max_restarts == 3
    assert arguments.rdzv_conf == ("" if platform == "slurm" else "is_host=0")

    script, overrides = arguments.training_script, arguments.training_script_args
    config_name = overrides[overrides.index("--config-name") + 1]
    overrides = [word for word in overrides if "=" in word]
    register_schema()
    with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT_DIR / "hydra_config" / "llama")):
        config = load_config(compose(config_name, overrides=overrides), script.removesuffix(".py"), 8, overrides)
    shared = str(tmp_path) if platform == "slurm" else ""
    assert config.checkpoint.ckpt_dir.startswith(f"{shared}/shared/")
    assert config.checkpoint.resume_from_checkpoint
    assert config.checkpoint.save_every_n_steps > 0


# Two tasks; signals go on to both; the status is the greatest. Output goes where srun was told.
SRUN = r"""
for word; do case $word in --output=*) out=${word#*=};; torchrun) break;; esac; shift_by=$((${shift_by:-0} + 1)); done
shift "$shift_by"
for node in 0 1; do "$@" > "${out//%n/$node}" 2>&1 & pids+=("$!"); done
trap 'kill -USR1 "${pids[@]}"' USR1
status=0
for pid in "${pids[@]}"; do
    while true; do
        wait "$pid"; code=$?
        kill -0 "$pid" 2> /dev/null || break
    done
    (( code > status )) && status=$code
done
exit "$status"
"""


RUN = "train_fsdp2.py --config-name L0_sanity num_train_steps=100000 validation.enabled=false"


def start_slurm_job(folder, torchrun):
    """The script as sbatch would start it, with a small RUN and both agents on this machine."""
    fake_tool(folder, "torchrun", torchrun)
    fake_tool(folder, "srun", SRUN)
    fake_tool(folder, "scontrol", f'[ "$1" = requeue ] && echo "$2" > {folder}/requeued || echo localhost')
    script = SCRIPTS["slurm"].replace("SHARED=/shared/native-te", f"SHARED={folder}/shared")
    script, changed = re.subn(r"^RUN=.*$", f"RUN=({PROJECT_DIR}/{RUN})", script, flags=re.MULTILINE)
    assert changed == 1
    (folder / "job.sh").write_text(script)
    environment = os.environ | {
        "PATH": f"{folder}/bin{os.pathsep}{TOOLS}",
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "2",
    }
    (folder / "job_id").write_text(environment["SLURM_JOB_ID"])
    return subprocess.Popen(["bash", str(folder / "job.sh")], env=environment, cwd=folder, start_new_session=True)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def slurm_job(tmp_path):
    jobs = []

    def start(torchrun):
        jobs.append(start_slurm_job(tmp_path, torchrun))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.poll() is None:
            job.send_signal(signal.SIGUSR1)  # torchrun's workers are in sessions of their own: their agents end them
            try:
                job.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def test_slurm_time_limit(tmp_path, slurm_job):
    """Two real agents train; the signal reaches their workers, which save; the job is requeued, and resumes."""
    run_dir = tmp_path / "shared" / "checkpoints" / "train_fsdp2"

    def last_step():
        metrics = run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        return json.loads(lines[-1])["step"] if lines else 0

    torchrun = f'OMP_NUM_THREADS=1 exec {sys.executable} -m torch.distributed.run "$@"'
    job = slurm_job(torchrun)
    wait_for(lambda: last_step() > 1)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 1
    saved = last_step()
    assert [path.name for path in run_dir.glob("step_*")] == [f"step_{saved}"]
    assert (tmp_path / "requeued").read_text().strip() == (tmp_path / "job_id").read_text()

    job = slurm_job(torchrun)
    wait_for(lambda: last_step() > saved)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 1
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert f"step_{saved}" in "".join(path.read_text() for path in (tmp_path / "shared" / "logs").iterdir())


@pytest.mark.parametrize("status", [0, 3])
def test_slurm_job_that_ends_by_itself_is_not_requeued(tmp_path, slurm_job, status):
    assert slurm_job(f"exit {status}").wait(timeout=30) == status
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    "name, status, requeued",
    [("SIGUSR1", 1, True), ("SIGUSR1", 0, False), ("SIGTERM", 1, False)],
    ids=["out of time", "done just in time", "preempted: Slurm requeues by itself"],
)
def test_slurm_job_waits_for_its_agents(tmp_path, slurm_job, name, status, requeued):
    wait = f"trap 'touch $$.told' USR1; touch $$.started; until [ -e may_end ]; do sleep 0.05; done; exit {status}"
    job = slurm_job(f"cd {tmp_path}; {wait}")
    wait_for(lambda: len(list(tmp_path.glob("*.started"))) == 2)
    job.send_signal(getattr(signal, name))
    if name == "SIGUSR1":
        wait_for(lambda: len(list(tmp_path.glob("*.told"))) == 2)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(timeout=0.3)
    (tmp_path / "may_end").touch()
    assert job.wait(timeout=30) == status
    assert (tmp_path / "requeued").exists() == requeued
