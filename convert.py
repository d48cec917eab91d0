"""Converts models between Hugging Face and TransformerEngine (TE) weights: state dicts, models, folders; a command.

    python convert.py hf-to-te meta-llama/Llama-3.2-1B llama-te        # a local folder or a name on the Hub
    python convert.py te-to-hf final_model llama-hf                    # what it makes loads with plain transformers

Lossless: convert_map.py says which rows go where. Folders are converted as bytes, row range by row range, from the
shards that hold them to the shard that wants them: beside the headers, one read buffer is all the memory it takes.
A weight file is 8 bytes of length, a JSON header, the tensors' bytes (https://github.com/huggingface/safetensors).
"""

import argparse
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from convert_map import HF_TO_TE, LAYOUTS, TE_TO_HF, TensorMap, check_tied, converted, num_rows, plan, some
from export import RUN_FIELDS, write_model_code
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM
from modeling_mixtral_te import NVMixtralConfig, NVMixtralForCausalLM


logger = logging.getLogger(__name__)

# By model_type: Hugging Face's config, and the architecture on either side.
FAMILIES = {
    "llama": (LlamaConfig, "LlamaForCausalLM", "NVLlamaForCausalLM"),
    "mixtral": (MixtralConfig, "MixtralForCausalLM", "NVMixtralForCausalLM"),
}
# What a config.json of this project has beyond Hugging Face's.
TE_CONFIG_KEYS = (
    *RUN_FIELDS,
    *("router_z_loss_coef", "router_bias_update_rate", "auto_map"),
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
COPIED_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "added_tokens.json"),
    *("special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
READ_BYTES = 4 * 2**20


# ---- State dicts and models in memory. ----


def hf_to_te_state_dict(state_dict: Mapping[str, torch.Tensor], config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """A Hugging Face state dict in TE's names and layouts; new tensors of the same dtypes.

    Args:
        state_dict: of ``LlamaForCausalLM``, or of ``MixtralForCausalLM`` in either layout (told by its names).
        config: of that model.

    Raises:
        ValueError: missing, extra or misshapen tensors; a tied head that is not the embedding.
    """
    table = plan(HF_TO_TE, state_dict, config, LAYOUTS[0])
    check_tied(config, state_dict)
    return dict(converted(table, state_dict))


def te_to_hf_state_dict(
    state_dict: Mapping[str, torch.Tensor], config: PreTrainedConfig, layout: str = "transformers4"
) -> dict[str, torch.Tensor]:
    """The way back; ``_extra_state`` entries are left out.

    Args:
        state_dict: of ``NVLlamaForCausalLM`` or ``NVMixtralForCausalLM``, whole tensors in high precision.
        config: of that model.
        layout: for Mixtral, see :func:`convert_map.hf_to_te_map`.

    Raises:
        ValueError: as :func:`hf_to_te_state_dict`.
    """
    table = plan(TE_TO_HF, state_dict, config, layout)
    check_tied(config, state_dict)
    return dict(converted(table, state_dict))


def convert_llama_hf_to_te(model_hf: LlamaForCausalLM, **config_kwargs: Any) -> NVLlamaForCausalLM:
    """The same model on TE layers, on the same device, in the same dtype.

    Args:
        model_hf: a model whose parameters share one dtype.
        config_kwargs: fields of :class:`NVLlamaConfig` to set, such as ``attn_input_format="thd"``.

    Raises:
        ValueError: several dtypes; an unknown field; a model that the TE layers cannot express.
    """
    return _convert_model(HF_TO_TE, model_hf, NVLlamaForCausalLM, _te_config(model_hf, NVLlamaConfig, config_kwargs))


def convert_llama_te_to_hf(model_te: NVLlamaForCausalLM) -> LlamaForCausalLM:
    """The same model in plain transformers, on the same device, in the same dtype.

    Raises:
        ValueError: parameters of several dtypes.
    """
    return _convert_model(TE_TO_HF, model_te, LlamaForCausalLM, _hf_config(model_te, LlamaConfig))


def convert_mixtral_hf_to_te(model_hf: MixtralForCausalLM, **config_kwargs: Any) -> NVMixtralForCausalLM:
    """As :func:`convert_llama_hf_to_te`, for Mixtral."""
    config = _te_config(model_hf, NVMixtralConfig, config_kwargs)
    return _convert_model(HF_TO_TE, model_hf, NVMixtralForCausalLM, config)


def convert_mixtral_te_to_hf(model_te: NVMixtralForCausalLM) -> MixtralForCausalLM:
    """As :func:`convert_llama_te_to_hf`, for Mixtral."""
    return _convert_model(TE_TO_HF, model_te, MixtralForCausalLM, _hf_config(model_te, MixtralConfig))


def _te_config(model_hf: PreTrainedModel, config_class: type, config_kwargs: dict[str, Any]) -> PreTrainedConfig:
    if unknown := config_kwargs.keys() - config_class().to_dict().keys():
        raise ValueError(f"{some(sorted(unknown))}: not a field of {config_class.__name__}.")
    return config_class(**{**model_hf.config.to_dict(), **config_kwargs})


def _hf_config(model_te: PreTrainedModel, config_class: type) -> PreTrainedConfig:
    return config_class(**{k: v for k, v in model_te.config.to_dict().items() if k not in TE_CONFIG_KEYS})


def _convert_model(
    direction: str, source: PreTrainedModel, target_class: type[PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    dtypes = {parameter.dtype for parameter in source.parameters()}
    if len(dtypes) > 1:
        raise ValueError(f"the model has parameters of {some(map(str, dtypes))}: cast it to one dtype first.")
    config.architectures = [target_class.__name__]
    tensors = source.state_dict()
    table = plan(direction, tensors, config, LAYOUTS[1])
    check_tied(config, tensors)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtypes.pop())
    try:
        with torch.device(source.device):
            target = target_class(config)
    finally:
        torch.set_default_dtype(default_dtype)
    targets = target.state_dict()
    with torch.no_grad():
        for key, tensor in converted(table, tensors):
            targets[key].copy_(tensor)
    if source.can_generate() and target.can_generate():
        target.generation_config = source.generation_config
    return target.train(source.training)


# ---- Folders. ----


class StoredTensor(NamedTuple):
    """Where a tensor's bytes lie: ``nbytes`` from ``offset`` on in ``path``; ``dtype`` as safetensors names it."""

    path: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_nbytes(self) -> int:
        return self.nbytes // num_rows(self.shape)

    def chunks(self, file: BinaryIO, first: int, count: int) -> Iterator[bytes]:
        """The bytes of ``count`` rows from row ``first`` on, from its open file, at most READ_BYTES at a time."""
        file.seek(self.offset + first * self.row_nbytes)
        left = count * self.row_nbytes
        while left:
            chunk = file.read(min(left, READ_BYTES))
            if not chunk:
                raise ValueError(f"{self.path} ended before its tensors did: it was cut while being read.")
            left -= len(chunk)
            yield chunk


def _read_shard(path: Path) -> dict[str, StoredTensor]:
    """The header of a safetensors file; safetensors itself checks that it matches the file's length."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: complete the download or copy.")
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}): fetch it again.") from error
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return {
        key: StoredTensor(
            path,
            8 + header_bytes + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
            entry["dtype"],
            tuple(entry["shape"]),
        )
        for key, entry in header.items()
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: complete the download or copy.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object.")
    return content


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, by the index where there is one.

    Raises:
        ValueError: no weights, a missing or damaged shard, an index that does not describe its shards.
    """
    if (folder / WEIGHTS).is_file():
        return _read_shard(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        others = sorted(
            path.name for path in folder.glob("*") if path.suffix in (".bin", ".pth", ".pt", ".safetensors")
        )
        hint = f" It has {some(others)}: save the model as safetensors with transformers first." if others else ""
        raise ValueError(f"{folder} holds neither {WEIGHTS} nor {INDEX}.{hint}")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map: fetch it again.")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        shard = _read_shard(folder / name)
        indexed = {key for key, shard_name in weight_map.items() if shard_name == name}
        if indexed != shard.keys():
            raise ValueError(f"{INDEX} and {folder / name} disagree on {some(sorted(indexed ^ shard.keys()))}.")
        tensors |= shard
    return tensors


def _write_shard(
    path: Path, keys: list[str], table: TensorMap, tensors: Mapping[str, StoredTensor], files: dict
) -> None:
    """A safetensors file of these targets, copied row range by row range from the open source files."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key in keys:
        end = offset + _target_nbytes(key, table, tensors)
        dtype = tensors[table.rows[key][0].key].dtype
        header[key] = {"dtype": dtype, "shape": list(table.target_shapes[key]), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of 8
    with open(path, "wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for key in keys:
            for part in table.rows[key]:
                source = tensors[part.key]
                for chunk in source.chunks(files[source.path], part.first, part.count):
                    out.write(chunk)


def _target_nbytes(key: str, table: TensorMap, tensors: Mapping[str, StoredTensor]) -> int:
    return sum(part.count * tensors[part.key].row_nbytes for part in table.rows[key])


def _write_weights(folder: Path, table: TensorMap, tensors: Mapping[str, StoredTensor], max_shard_bytes: int) -> None:
    """Shards filled in the model's order up to ``max_shard_bytes``; a larger tensor has a shard to itself."""
    sizes = {key: _target_nbytes(key, table, tensors) for key in table.rows}
    shards: list[list[str]] = []
    room = 0
    for key, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(key)
        room -= size
    weight_map = {}
    with ExitStack() as stack:
        paths = {tensor.path for tensor in tensors.values()}
        files = {path: stack.enter_context(open(path, "rb", buffering=0)) for path in paths}
        for number, keys in enumerate(shards, start=1):
            name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            # Wide dtypes first: then every tensor starts at a multiple of its element size.
            keys = sorted(keys, key=lambda key: -sizes[key] // math.prod(table.target_shapes[key]))
            _write_shard(folder / name, keys, table, tensors, files)
            weight_map |= dict.fromkeys(keys, name)
            logger.info("%s: %d tensors, %.3f GB", name, len(keys), sum(sizes[key] for key in keys) / 1e9)
    if len(shards) > 1:
        num_parameters = sum(math.prod(shape) for shape in table.target_shapes.values())
        metadata = {"total_parameters": num_parameters, "total_size": sum(sizes.values())}
        _write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _complete_folder(destination: Path) -> Iterator[Path]:
    """A folder beside ``destination`` that takes its name once the block ends well, and vanishes otherwise."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def resolve_source(name: str | os.PathLike) -> Path:
    """A local folder, or a model of the Hub downloaded (or found in the cache) without its non-safetensors weights.

    Raises:
        ValueError: neither.
    """
    if os.path.isdir(name):
        return Path(name)
    try:
        return Path(
            snapshot_download(str(name), allow_patterns=["config.json", "model*.safetensors", INDEX, *COPIED_FILES])
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{os.fspath(name)!r} is neither a folder nor a model that the Hub gives: {error}") from error


def convert_folder(
    direction: str,
    source: str | os.PathLike,
    destination: str | os.PathLike,
    max_shard_bytes: int = 5 * 10**9,
    layout: str = "transformers4",
) -> None:
    """Converts a model folder; ``destination`` appears whole or not at all.

    Args:
        direction: ``hf-to-te`` or ``te-to-hf``.
        source: a folder, or a name on the Hub.
        destination: a folder that does not exist yet.
        max_shard_bytes: of one output file's tensors, unless a single tensor is larger.
        layout: of Mixtral's output for ``te-to-hf``, see :func:`convert_map.hf_to_te_map`.

    Raises:
        ValueError: another architecture; missing, extra, misshapen or damaged weights; a destination that exists or has
            no room. Nothing is left behind.
    """
    if direction not in (HF_TO_TE, TE_TO_HF):
        raise ValueError(f"direction={direction!r} is neither {HF_TO_TE} nor {TE_TO_HF}.")
    destination = Path(os.path.abspath(destination))
    if os.path.lexists(destination):
        raise ValueError(f"{destination} exists: choose a new folder, or remove it first.")
    folder = resolve_source(source)
    raw_config = _read_json(folder / "config.json")
    config, target_config = _configs(direction, raw_config, folder / "config.json")
    tensors = read_folder(folder)
    table = plan(direction, tensors, config, layout)
    check_tied(config, tensors, _same_bytes)
    if direction == HF_TO_TE and config.model_type == "llama":
        NVLlamaConfig.from_dict(target_config).check()
    needed = sum(_target_nbytes(key, table, tensors) for key in table.rows)
    existing_parent = next(parent for parent in destination.parents if parent.exists())
    if (free := shutil.disk_usage(existing_parent).free) < needed:
        raise ValueError(f"{destination} needs {needed / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free.")
    with _complete_folder(destination) as partial:
        _write_weights(partial, table, tensors, max_shard_bytes)
        _write_json(partial / "config.json", target_config)
        if direction == HF_TO_TE:
            write_model_code(partial, target_config["architectures"][0])
        for name in COPIED_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, partial / name)


def _configs(direction: str, raw: dict[str, Any], path: Path) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The source's config, and the target's config.json: the same fields, less TE's own on the way out."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    if model_type not in FAMILIES:
        raise ValueError(f"{path}: model_type={model_type!r}: only {' and '.join(FAMILIES)} can be converted.")
    config_class, *names = FAMILIES[model_type]
    here, there = names if direction == HF_TO_TE else reversed(names)
    if architectures != [here]:
        raise ValueError(f"{path}: architectures={architectures}: {direction} takes [{here!r}].")
    fields = {key: value for key, value in raw.items() if key not in TE_CONFIG_KEYS}
    try:
        return config_class.from_dict(dict(fields)), {**fields, "architectures": [there]}
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {error}") from error


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open(one.path, "rb") as file, open(other.path, "rb") as other_file:
        pairs = (
            tensor.chunks(opened, 0, num_rows(tensor.shape)) for tensor, opened in ((one, file), (other, other_file))
        )
        return all(a == b for a, b in zip(*pairs, strict=True))


def parse_size(text: str) -> int:
    """``5GB``, ``500MB``, ``2GiB`` or plain bytes."""
    match = re.fullmatch(r"(\d+)\s*(?:([KMGT])(i?)B)?", text.strip())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 5GB, 500MB, 2GiB or a number of bytes")
    exponent = " KMGT".index(match[2] or " ")
    return int(match[1]) * (1024 if match[3] else 1000) ** exponent


def main(arguments: list[str] | None = None) -> None:
    """The command line; ends with status 1 and one message on bad input."""
    parser = argparse.ArgumentParser(
        description="Convert a model folder between Hugging Face and TransformerEngine weights."
    )
    parser.add_argument("direction", choices=[HF_TO_TE, TE_TO_HF])
    parser.add_argument("source", help="a model folder, or its name on the Hugging Face Hub")
    parser.add_argument("destination", help="the folder to make")
    parser.add_argument("--max-shard-size", type=parse_size, default="5GB", help="of one weight file (default: 5GB)")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="te-to-hf of Mixtral: names of the experts (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        convert_folder(args.direction, args.source, args.destination, args.max_shard_size, args.layout)
    except (ValueError, OSError) as error:
        raise SystemExit(f"convert.py: {error}") from error
    logger.info("wrote %s", args.destination)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the partial folder is removed
    main()
