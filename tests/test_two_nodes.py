"""Two nodes on one machine: two torchrun agents with the c10d rendezvous; one is lost and comes back."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dist_utils import REPOSITORY, free_port


NUM_STEPS = 60
OPTIONS = [
    "--config-name=L0_sanity",
    "config_kwargs.hidden_size=32",
    "config_kwargs.intermediate_size=64",
    "dataset.max_seq_length=64",
    "dataset.micro_batch_size=2",
    "validation.enabled=false",
    f"num_train_steps={NUM_STEPS}",
    "checkpoint.ckpt_dir=ckpt",
    "checkpoint.save_every_n_steps=5",
    "checkpoint.resume_from_checkpoint=true",
]
# The agents' own store, which the workers share by default, is announced to a node once only: one that takes another's
# place would wait in vain (torch 2.11 and 2.13).
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Node:
    """A torchrun agent with one worker, as on a node of its own."""

    def __init__(self, port: int, folder: Path, name: str, *options: str):
        rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=job"]
        # A node that has not been heard of for 3 s is lost: 15 s by default.
        rendezvous += ["--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=3", "--max_restarts=3"]
        torchrun = ["torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", *rendezvous]
        command = [sys.executable, "-m", *torchrun, str(REPOSITORY / "train_fsdp2.py"), *OPTIONS, *options]
        self.log = folder / f"{name}.log"
        with open(self.log, "w") as log:
            self.agent = subprocess.Popen(
                command, cwd=folder, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children")
        return [int(pid) for pid in children.read_text().split()] if self.agent.poll() is None else []

    def kill(self) -> None:
        """As when the power fails: the agent and the sessions of its workers, without a warning."""
        workers = self.workers()
        self.agent.kill()
        for worker in workers:
            os.killpg(worker, signal.SIGKILL)
        self.agent.wait()


def wait_until(condition: Callable[[], bool], nodes: list[Node], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        report = "\n".join(f"--- {node.log.name}\n{node.log.read_text()[-6000:]}" for node in nodes)
        assert time.monotonic() < deadline, report
        time.sleep(0.05)


def test_a_lost_node_comes_back_and_training_goes_on(tmp_path):
    """From the last committed checkpoint; every step is logged once, and steps run again repeat their losses."""
    directory = tmp_path / "ckpt" / "train_fsdp2"
    metrics, port = directory / "metrics.jsonl", free_port()

    def rows() -> list[dict]:
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    nodes = [Node(port, tmp_path, "first")]
    try:
        wait_until(listening, nodes, 60)  # the first node is to host the rendezvous: the job does not outlive that one
        nodes.append(Node(port, tmp_path, "second"))
        wait_until(lambda: (directory / "step_10").exists(), nodes, 60)
        nodes[1].kill()
        before = rows()
        committed = max(int(path.parent.name.split("_")[1]) for path in directory.glob("step_*/commit.json"))
        nodes.append(Node(port, tmp_path, "second_again"))
        survivors = [nodes[0], nodes[2]]
        wait_until(lambda: all(node.agent.poll() is not None for node in survivors), nodes, 90)
        assert [node.agent.returncode for node in survivors] == [0, 0], nodes[0].log.read_text()[-6000:]
    finally:
        for node in nodes:
            node.kill()
    after = rows()
    assert 10 <= committed <= before[-1]["step"] < NUM_STEPS
    assert [row["step"] for row in after] == list(range(1, NUM_STEPS + 1))
    assert [row["loss"] for row in after[: len(before)]] == [row["loss"] for row in before]
    logs = "".join(node.log.read_text() for node in survivors)
    assert f"resuming from {directory / f'step_{committed}'}" in logs
