"""checkpoint.py: what is loaded is what was saved, in any layout; what is not whole does not count."""

import json
import logging
import os
import resource
import signal
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import commits
import te_reference
from checkpoint import Checkpointer, model_tensors
from config import AdamWConfig, CheckpointConfig, SchedulerConfig, TrainConfig
from dist_utils import RanksFailed, run_on_ranks
from optimizer import build_optimizer
from scheduler import build_scheduler


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Net(nn.Module):
    """Odd sizes, so that shards are uneven; a tied weight, a buffer, and TE's kind of extra state."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(()))

    def get_extra_state(self):
        return torch.zeros(torch.randint(1, 9, ()), dtype=torch.uint8)  # its size varies

    def set_extra_state(self, state):
        raise AssertionError("extra state must not be in a checkpoint")

    def forward(self, ids_S):
        hidden_SD = self.embed(ids_S)
        for layer in self.layers:
            hidden_SD = hidden_SD + torch.tanh(layer(hidden_SD)) * self.scale
        return self.head(self.norm(hidden_SD))


class Run:
    """A model in some layout with its optimiser and scheduler, trained on the same batch by every rank."""

    def __init__(self, folder, layout="plain", seed=0, dtype=torch.float32, masters=False, width=5, lr=0.05, **options):
        torch.manual_seed(seed)
        self.net = Net(width).to(dtype)
        self.model = self.net
        if layout == "ddp":
            self.model = DistributedDataParallel(self.net)
        elif layout in ("fsdp2", "hsdp"):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            if layout == "hsdp":
                mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
            for layer in self.net.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)
        config = TrainConfig(adamw_kwargs=AdamWConfig(lr=lr), use_fp32_master_weights=masters)
        self.optimizer = build_optimizer(self.model, config, te_reference)
        self.scheduler = build_scheduler(self.optimizer, SchedulerConfig(num_warmup_steps=2, num_decay_steps=9))
        config = CheckpointConfig(ckpt_dir=str(folder), **{"resume_from_checkpoint": True} | options)
        self.checkpointer = Checkpointer(config, "train_x", self.model, self.optimizer, self.scheduler)

    def train(self, first: int, last: int) -> "Run":
        for step in range(first, last + 1):
            ids_S = torch.randint(7, (12,), generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(self.model(ids_S).float(), ids_S.roll(-1)).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Everything that training changes, gathered; collective."""

        def full(tensor):
            return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

        snapshot = {name: full(tensor) for name, tensor in model_tensors(self.model).items()}
        for name, param in self.net.named_parameters():
            for key, value in self.optimizer.state[param].items():
                snapshot[f"{name} {key}"] = full(value)
        for index, group in enumerate(self.optimizer.param_groups):
            snapshot[f"lr {index}"] = torch.tensor(group["lr"], dtype=torch.float64)
            snapshot[f"step {index}"] = torch.tensor(group.get("step", 0))
        return snapshot


def fresh(folder, **options) -> Run:
    """A run that does not resume; ``Run`` does where there is something."""
    return Run(folder, resume_from_checkpoint=False, **options)


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


def steps_in(folder) -> list[str]:
    return sorted(path.name for path in Path(folder, "train_x").iterdir())


# One process


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("dtype, masters", [(torch.float32, False), (torch.bfloat16, True)])
def test_resumed_run_continues_bit_for_bit(tmp_path, dtype, masters, async_save):
    options = {"dtype": dtype, "masters": masters, "async_save": async_save}
    run = Run(tmp_path, **options).train(1, 3)
    at_save = run.snapshot()
    run.checkpointer.save(3, {"position": 33})
    expected = run.train(4, 6).snapshot()  # what an asynchronous save copied must not follow this
    run.checkpointer.close()

    resumed = Run(tmp_path, seed=1, **options)
    loaded = resumed.checkpointer.load()
    assert (loaded.step, loaded.rank_states) == (3, [{"position": 33}])
    assert_equal(resumed.snapshot(), at_save)
    assert_equal(resumed.train(4, 6).snapshot(), expected)
    assert steps_in(tmp_path) == ["step_3"]


def test_resume_follows_the_learning_rate_of_its_own_config(tmp_path):
    Run(tmp_path, lr=0.05).train(1, 1).checkpointer.save(1, {})
    resumed = Run(tmp_path, lr=0.5)
    resumed.checkpointer.load()
    assert resumed.optimizer.param_groups[0]["lr"] == 0.5  # step 2 ends the warm-up of 2


def test_no_checkpoint(tmp_path, caplog):
    run = Run(tmp_path)
    before = run.snapshot()
    assert run.checkpointer.load() is None
    assert "no committed checkpoint" in caplog.text
    assert_equal(run.snapshot(), before)


def test_newest_is_the_one_committed_last_and_the_earlier_run_is_kept(tmp_path, caplog):
    """A run that starts afresh in a used folder: its step 1 is newer than the old run's step 3; it prunes only its
    own."""
    old = Run(tmp_path, save_every_n_steps=1).train(1, 1)
    for step in (1, 2, 3):
        old.checkpointer.save(step, {"run": "old"})
    new = fresh(tmp_path, save_every_n_steps=1, max_checkpoints=1)
    assert "holds 3 checkpoints of an earlier run" in caplog.text
    new.checkpointer.save(1, {"run": "new"})
    loaded = Run(tmp_path).checkpointer.load()
    assert (loaded.step, loaded.rank_states) == (1, [{"run": "new"}])
    new.checkpointer.save(4, {"run": "new"})
    aside, *others = sorted(steps_in(tmp_path), key=lambda name: ".earlier_" not in name)
    assert aside.startswith("step_1.earlier_")
    assert others == ["earlier_runs.json", "step_2", "step_3", "step_4"]


def test_a_resume_never_goes_behind_a_run_that_started_afresh(tmp_path, caplog):
    """a saves, b starts afresh and saves nothing: c is not the continuation of a, and says how it could be."""
    for step in (10, 20):
        Run(tmp_path).checkpointer.save(step, {"run": "a"})
    fresh(tmp_path)
    caplog.clear()
    third = Run(tmp_path)
    assert third.checkpointer.load() is None
    note = tmp_path / "train_x" / "earlier_runs.json"
    assert f"the 2 checkpoints in {tmp_path / 'train_x'} belong to earlier runs, says {note}. Delete" in caplog.text
    third.checkpointer.save(2, {"run": "c"})
    assert Run(tmp_path).checkpointer.load().rank_states == [{"run": "c"}]
    (tmp_path / "train_x" / "step_2" / "commit.json").unlink()
    assert Run(tmp_path).checkpointer.load() is None  # nothing of a stands in for it
    note.unlink()
    loaded = Run(tmp_path).checkpointer.load()
    assert (loaded.step, loaded.rank_states) == (20, [{"run": "a"}])


def test_a_resumed_process_neither_prunes_nor_overwrites_an_earlier_run(tmp_path):
    for step in (1, 2, 3):
        Run(tmp_path).checkpointer.save(step, {"run": "a"})
    fresh(tmp_path).checkpointer.save(1, {"run": "b"})
    resumed = Run(tmp_path, max_checkpoints=1)
    assert resumed.checkpointer.load().rank_states == [{"run": "b"}]
    resumed.checkpointer.save(2, {"run": "b"})
    aside = {path.name.split("_")[1]: path for path in (tmp_path / "train_x").glob("*.earlier_*")}
    assert sorted(aside) == ["1.earlier", "2.earlier"]
    assert torch.load(aside["2.earlier"] / "rank_0.pt") == {"run": "a"}
    assert [name for name in steps_in(tmp_path) if ".earlier_" not in name] == ["earlier_runs.json", "step_2", "step_3"]
    fresh(tmp_path)  # a third run: now b's are an earlier run's, too
    last = Run(tmp_path, max_checkpoints=1)
    assert last.checkpointer.load() is None
    last.checkpointer.save(9, {})
    assert {"step_2", "step_3", "step_9"} <= set(steps_in(tmp_path))


def test_a_commit_that_a_kill_left_unnamed_does_not_replace_an_earlier_run_s(tmp_path, monkeypatch):
    Run(tmp_path).checkpointer.save(1, {"run": "a"})
    second = fresh(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_make_final", lambda self, staging: None)
        second.checkpointer.save(1, {"run": "b"})
    resumed = Run(tmp_path)
    assert resumed.checkpointer.load().rank_states == [{"run": "b"}]
    resumed.checkpointer.save(2, {})  # tidies up
    (aside,) = (tmp_path / "train_x").glob("step_1.earlier_*")
    assert torch.load(aside / "rank_0.pt") == {"run": "a"}
    assert torch.load(tmp_path / "train_x" / "step_1" / "rank_0.pt") == {"run": "b"}


def test_commits_count_on_from_a_deleted_earlier_run(tmp_path):
    for step in (1, 2):
        Run(tmp_path).checkpointer.save(step, {})
    new = fresh(tmp_path)
    for step in (1, 2):
        (tmp_path / "train_x" / f"step_{step}" / "commit.json").unlink()
    new.checkpointer.save(5, {})
    assert Run(tmp_path).checkpointer.load().step == 5


def test_a_damaged_note_of_earlier_runs(tmp_path):
    Run(tmp_path)
    for text in ("", "[]", "{}", '{"last_commit": null}'):
        (tmp_path / "train_x" / "earlier_runs.json").write_text(text)
        with pytest.raises(ValueError, match=r"earlier_runs\.json is damaged: delete it"):
            Run(tmp_path)


def save_from_a_process_of_its_own(folder: str) -> str:
    try:
        Run(folder, save_every_n_steps=1)
    except ValueError as error:
        return str(error)
    return "not refused"


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    first = Run(tmp_path, save_every_n_steps=1)
    assert "is in use by another run" in run_on_ranks(save_from_a_process_of_its_own, 1, str(tmp_path))[0]
    first.checkpointer.save(1, {})
    assert steps_in(tmp_path) == ["step_1"]


def test_damaged_markers_and_metadata(tmp_path, caplog):
    run = Run(tmp_path)
    run.checkpointer.save(1, {"kept": True})
    for step, marker in enumerate(("[]", "null", "5", '{"files": ["a"]}', '{"files": {}, "commit": 9}'), start=2):
        folder = tmp_path / "train_x" / f"step_{step}"
        folder.mkdir()
        (folder / "commit.json").write_text(marker)
    assert Run(tmp_path).checkpointer.load().rank_states == [{"kept": True}]
    metadata = tmp_path / "train_x" / "step_1" / ".metadata"
    metadata.write_bytes(b"x" * metadata.stat().st_size)
    with pytest.raises(RuntimeError, match=r"step_1 is damaged: move it away"):
        Run(tmp_path).checkpointer.load()


def test_pruning_keeps_the_newest_and_what_is_not_ours(tmp_path):
    run = Run(tmp_path, max_checkpoints=2)
    foreign = [tmp_path / "train_x" / name for name in ("notes", "step_1_backup", "step_0", "final_model")]
    for folder in foreign:
        folder.mkdir()
    for step in (1, 2, 10):
        run.checkpointer.save(step, {})
    assert steps_in(tmp_path) == sorted(["step_2", "step_10", *(folder.name for folder in foreign)])


def test_half_written_and_damaged_checkpoints_are_passed_over(tmp_path, caplog):
    run = Run(tmp_path)
    for step in (1, 2, 3, 4):
        run.checkpointer.save(step, {})
    folder = tmp_path / "train_x"
    (folder / "step_5.staging").mkdir()
    (folder / "step_4" / "commit.json").unlink()
    data = next((folder / "step_3").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    (folder / "step_2" / "rank_0.pt").unlink()
    resumed = Run(tmp_path)
    assert resumed.checkpointer.load().step == 1
    for name in ("step_2", "step_3", "step_4", "step_5.staging"):
        assert f"ignoring {folder / name}:" in caplog.text
    resumed.checkpointer.save(4, {"again": True})  # takes the place of the damaged one
    assert "removing" in caplog.text
    assert steps_in(tmp_path) == ["step_1", "step_2", "step_3", "step_4"]
    assert Run(tmp_path).checkpointer.load().rank_states == [{"again": True}]


def test_marker_lists_every_file(tmp_path):
    Run(tmp_path).checkpointer.save(1, {})
    folder = tmp_path / "train_x" / "step_1"
    marker = json.loads((folder / "commit.json").read_text())
    assert (marker["step"], marker["world_size"]) == (1, 1)
    assert {*marker["files"], "commit.json"} == {file.name for file in folder.iterdir()}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": 6}, r"model.embed.weight is \[7, 5\] torch.float32 there, \[7, 6\] torch.float32 here"),
        ({"dtype": torch.bfloat16}, "torch.float32 there, .* torch.bfloat16 here"),
        ({"dtype": torch.bfloat16, "masters": True}, "master_param is not in the checkpoint"),
    ],
)
def test_checkpoint_of_another_model_is_refused(tmp_path, changes, message):
    Run(tmp_path).checkpointer.save(1, {})
    other = Run(tmp_path, **changes)
    before = {name: value.clone() for name, value in model_tensors(other.model).items()}
    with pytest.raises(ValueError, match=message):
        other.checkpointer.load()
    assert_equal(model_tensors(other.model), before)


def test_stored_tensors_that_nobody_asks_for_are_an_error(tmp_path):
    Run(tmp_path).checkpointer.save(1, {})
    other = Run(tmp_path)
    del other.net.layers[1]
    with pytest.raises(ValueError, match=r"layers.1.weight is in the checkpoint only"):
        other.checkpointer.load()


def test_meta_model_is_refused(tmp_path):
    run = Run(tmp_path)
    run.net.to("meta")
    with pytest.raises(ValueError, match="meta device"):
        run.checkpointer.save(1, {})


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint.ckpt_dir='.*file/sub' cannot be written: give a folder"):
        Run(tmp_path / "file" / "sub")


def test_nothing_is_pruned_until_the_new_checkpoint_is_whole(tmp_path, monkeypatch):
    """The flush takes its time, then fails: the old checkpoint is there throughout, and the failure is raised."""
    run = Run(tmp_path, async_save=True, max_checkpoints=1)
    run.checkpointer.save(1, {})
    run.checkpointer.close()
    release = Future()

    def slow_and_failing(self, plan, planner):
        release.result(timeout=30)
        raise OSError("no space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", slow_and_failing)
    run.checkpointer.save(2, {})
    assert steps_in(tmp_path) == ["step_1", "step_2.staging"]
    release.set_result(None)
    with pytest.raises(RuntimeError, match="no space left on device"):
        run.checkpointer.close()
    assert Run(tmp_path).checkpointer.load().step == 1


def test_async_commits_without_another_call(tmp_path):
    run = Run(tmp_path, async_save=True)
    run.checkpointer.save(1, {})
    deadline = time.monotonic() + 30
    while steps_in(tmp_path) != ["step_1"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.checkpointer.close()


def killed_while_saving(folder: str, moment: str, async_save: bool) -> None:
    """Commits step 1 and step 2, then dies by SIGKILL at some moment of saving step 2 once more."""
    run = Run(folder, async_save=async_save, max_checkpoints=1)
    run.checkpointer.save(1, {"version": 1})
    run.checkpointer.save(2, {"version": 2})
    run.checkpointer.close()

    def dying(function):
        def die(*args, **kwargs):
            function(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        return die

    if moment == "data written":
        dcp.FileSystemWriter.write_data = dying(dcp.FileSystemWriter.write_data)
    elif moment == "metadata written":
        dcp.FileSystemWriter.finish = dying(dcp.FileSystemWriter.finish)
    elif moment == "marker written":
        checkpoint.promote = dying(lambda staging: None)
    elif moment == "old one removed":
        commits.remove = dying(commits.remove)
    run.checkpointer.save(2, {"version": 3})
    run.checkpointer.close()


@pytest.mark.parametrize(
    "moment, async_save, version",
    [
        ("data written", True, 2),
        ("metadata written", True, 2),
        ("metadata written", False, 2),
        ("marker written", True, 3),
        ("old one removed", False, 3),
    ],
)
def test_kill_during_a_save_leaves_a_whole_checkpoint(tmp_path, moment, async_save, version):
    with pytest.raises(RanksFailed) as failure:
        run_on_ranks(killed_while_saving, 1, str(tmp_path), moment, async_save)
    assert failure.value.exit_codes == [-signal.SIGKILL]
    run = Run(tmp_path)
    loaded = run.checkpointer.load()
    assert (loaded.step, loaded.rank_states) == (2, [{"version": version}])
    run.checkpointer.save(3, {})  # tidies up
    assert steps_in(tmp_path) == ["step_2", "step_3"]
    (tmp_path / "train_x" / "step_3" / "commit.json").unlink()
    assert Run(tmp_path).checkpointer.load().rank_states == [{"version": version}]


# Several ranks


def save_layouts(folder: str) -> list[dict]:
    """Saves one run per layout in ``folder/<layout>``; snapshots at the save."""
    snapshots = []
    for layout in ("ddp", "fsdp2"):
        for async_save in (False, True):
            run = Run(f"{folder}/{layout}-{async_save}", layout, async_save=async_save).train(1, 3)
            snapshots.append(run.snapshot())
            run.checkpointer.save(3, {"rank": dist.get_rank()})
            run.train(4, 4)
            run.checkpointer.close()
    return snapshots


def load_layouts(folder: str) -> list[dict]:
    """Loads every checkpoint below ``folder`` into every layout; what each run then holds, and its rank states."""
    results = []
    for name in sorted(os.listdir(folder)):
        for layout in ("ddp", "fsdp2") if dist.get_world_size() == 2 else ("fsdp2", "hsdp"):
            run = Run(f"{folder}/{name}", layout, seed=dist.get_rank() + 1)
            loaded = run.checkpointer.load()
            assert loaded.step == 3
            results.append(
                {"states": loaded.rank_states, "snapshot": run.snapshot(), "after": run.train(4, 4).snapshot()}
            )
    return results


def test_layouts_and_world_sizes_read_each_other(tmp_path):
    """Saved by plain 1, DDP 2, FSDP2 2 (also asynchronous); loaded by plain 1, DDP and FSDP2 2, FSDP2 4, HSDP 2 x 2."""
    plain = Run(tmp_path / "plain").train(1, 3)
    expected = plain.snapshot()
    plain.checkpointer.save(3, {"rank": 0})
    after = plain.train(4, 4).snapshot()
    for snapshots in run_on_ranks(save_layouts, 2, str(tmp_path)):
        for snapshot in snapshots:  # the layouts train alike up to rounding
            for name, value in expected.items():
                torch.testing.assert_close(snapshot[name], value, rtol=1e-4, atol=1e-5)
            assert snapshot.keys() == expected.keys()
    saved = {"plain": expected}
    for name in ("ddp-False", "ddp-True", "fsdp2-False", "fsdp2-True"):
        run = Run(tmp_path / name, seed=9)
        assert run.checkpointer.load().rank_states == [{"rank": 0}, {"rank": 1}]
        saved[name] = run.snapshot()
        for key, value in expected.items():
            torch.testing.assert_close(saved[name][key], value, rtol=1e-4, atol=1e-5)
    del plain, run  # and with them their locks
    for world_size in (2, 4):
        for results in run_on_ranks(load_layouts, world_size, str(tmp_path)):
            for index, name in enumerate(sorted(saved)):
                for result in results[2 * index : 2 * index + 2]:
                    assert result["states"] == [{"rank": rank} for rank in range(1 if name == "plain" else 2)]
                    assert_equal(result["snapshot"], saved[name])
                    for key, value in after.items():
                        torch.testing.assert_close(result["after"][key], value, rtol=1e-4, atol=1e-5)


def several_ranks(folder: str) -> None:
    """Four ranks: an empty output folder; a folder, or a file, that one rank alone cannot write."""
    rank = dist.get_rank()
    run = Run(f"{folder}/new/deep", "ddp")
    run.checkpointer.save(1, {})

    Path(folder, "file").write_text("")
    broken = f"{folder}/file" if rank == 1 else f"{folder}/fine"
    with pytest.raises(ValueError, match=r"cannot be written.*rank 1: (NotADirectory|FileExists)Error"):
        Run(broken, "ddp")
    with pytest.raises(ValueError, match=r"not shared.*rank 2: OSError"):
        Run(f"{folder}/other-node" if rank == 2 else f"{folder}/fine", "ddp")
    dist.barrier()
    assert list(Path(folder, "fine", "train_x").iterdir()) == []  # nothing is left behind

    def full_disk(self, plan, planner):
        raise OSError("no space left on device")

    for async_save in (False, True):
        run = Run(f"{folder}/full-{async_save}", "ddp", async_save=async_save)
        write_data = dcp.FileSystemWriter.write_data
        if rank == 3:
            dcp.FileSystemWriter.write_data = full_disk
        with pytest.raises(RuntimeError, match="no space left on device"):
            run.checkpointer.save(1, {})
            run.checkpointer.close()
        dcp.FileSystemWriter.write_data = write_data
        assert run.checkpointer.load() is None
        with pytest.raises(RuntimeError, match=r"rank 2: .*pickle"):
            run.checkpointer.save(1, {"state": (lambda: 0) if rank == 2 else 0})


def test_failures_of_one_rank_are_errors_of_all(tmp_path):
    run_on_ranks(several_ranks, 4, str(tmp_path))
    assert steps_in(tmp_path / "new" / "deep") == ["step_1"]


def save_where_files_are_cut_off(folder: str) -> list[str]:
    """Two ranks; the operating system refuses files above 3,000 bytes."""
    messages = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for async_save in (False, True):
        run = Run(f"{folder}/{async_save}", "fsdp2", width=64, async_save=async_save).train(1, 1)
        run.checkpointer.save(1, {})
        run.checkpointer.close()
        saved = run.snapshot()
        run.train(2, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        with pytest.raises(RuntimeError) as error:
            run.checkpointer.save(2, {})
            run.checkpointer.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        messages.append(str(error.value))
        assert run.checkpointer.load().step == 1
        assert_equal(run.snapshot(), saved)
    return messages


def test_a_failed_write_says_why_where_and_what_to_do_in_one_line(tmp_path):
    for messages in run_on_ranks(save_where_files_are_cut_off, 2, str(tmp_path)):
        for message, async_save in zip(messages, (False, True), strict=True):
            assert message.startswith(f"{tmp_path}/{async_save}/train_x/step_2 cannot be written: make room")
            assert message.endswith("rank 0, 1: OSError: [Errno 27] File too large")
            assert "\n" not in message


@pytest.fixture(autouse=True)
def log_everything(caplog):
    caplog.set_level(logging.INFO)
