"""Memory and speed of converting a model folder.

    python benchmarks/bench_convert.py                                  # 2 billion parameters in BF16: 12 GB of disk
    python benchmarks/bench_convert.py --layers 1 --shard-size 200MB    # a quick look

Writes a random Llama in shards, converts it to TransformerEngine weights and back, each way in a process of its own,
and compares the bytes. One JSON line per direction: ``peak_gb`` is what the process held beyond what it holds once its
imports are done (VmHWM - VmRSS of /proc/self/status: Linux), ``ratio`` that over the largest file written.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig


PROJECT_DIR = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT_DIR))

import convert  # noqa: E402
from convert_map import HF_TO_TE, TE_TO_HF, hf_to_te_map  # noqa: E402


# Llama-3.1-8B's shapes in 5 layers, head and embedding apart: 2.14 billion parameters.
CONFIG = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def resident_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (highest so far) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def write_random_model(folder: Path, layers: int, shard_bytes: int) -> int:
    """A Hugging Face folder of random BF16 tensors, one shard in memory at a time; returns the parameter count."""
    config = LlamaConfig(**CONFIG, num_hidden_layers=layers, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    shapes = hf_to_te_map(config).source_shapes
    generator = torch.Generator().manual_seed(0)
    shard, shards, weight_map = {}, 0, {}
    for position, (key, shape) in enumerate(shapes.items(), start=1):
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
        shard[key] = bits.view(torch.bfloat16)
        if position == len(shapes) or sum(tensor.nbytes for tensor in shard.values()) > shard_bytes:
            shards += 1
            weight_map |= dict.fromkeys(shard, f"model-{shards:05d}.safetensors")
            save_file(shard, folder / f"model-{shards:05d}.safetensors", metadata={"format": "pt"})
            shard = {}
    (folder / convert.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def convert_and_measure(direction: str, source: str, destination: str, shard_bytes: int) -> dict:
    """Runs in the process that does nothing else."""
    before, start = resident_bytes("VmRSS"), time.perf_counter()
    convert.convert_folder(direction, source, destination, shard_bytes)
    seconds, peak = time.perf_counter() - start, resident_bytes("VmHWM") - before
    sizes = [path.stat().st_size for path in Path(destination).glob("*.safetensors")]
    return {
        "direction": direction,
        "files": len(sizes),
        "total_gb": round(sum(sizes) / 1e9, 3),
        "largest_file_gb": round(max(sizes) / 1e9, 3),
        "peak_gb": round(peak / 1e9, 4),
        "ratio": round(peak / max(sizes), 4),
        "seconds": round(seconds, 1),
        "gb_per_second": round(sum(sizes) / 1e9 / seconds, 2),
    }


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two folders hold the same bytes under the same keys; a shard and a tensor in memory at a time."""
    stored = convert.read_folder(one), convert.read_folder(other)
    if stored[0].keys() != stored[1].keys():
        return False
    for path in {tensor.path for tensor in stored[0].values()}:
        for key, tensor in load_file(path).items():
            with convert.safe_open(stored[1][key].path, framework="pt") as file:
                if not torch.equal(tensor.view(torch.uint8), file.get_tensor(key).view(torch.uint8)):
                    return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--shard-size", default="1GB", help="of input and output files (default: %(default)s)")
    parser.add_argument("--folder", help="where the three copies of the model go for the time being")
    parser.add_argument(
        "--measure", nargs=3, metavar=("DIRECTION", "SOURCE", "DESTINATION"), help="one conversion only"
    )
    args = parser.parse_args()
    shard_bytes = convert.parse_size(args.shard_size)
    if args.measure:
        print(json.dumps(convert_and_measure(*args.measure, shard_bytes)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        source, te, back = (Path(name) / part for part in ("source", "te", "back"))
        parameters = write_random_model(source, args.layers, shard_bytes)
        print(json.dumps({"parameters": parameters}), flush=True)
        for direction, here, there in ((HF_TO_TE, source, te), (TE_TO_HF, te, back)):
            measured = ["--measure", direction, str(here), str(there), "--shard-size", args.shard_size]
            subprocess.run([sys.executable, __file__, *measured], check=True)
        print(json.dumps({"round_trip_equal": same_tensors(source, back)}))


if __name__ == "__main__":
    main()
