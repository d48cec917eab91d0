"""Models and weights from a folder in TE's layout (``convert.py hf-to-te``, or a run's ``final_model``).

:func:`load_model` gives a whole model, for inference. :func:`load_weights` fills a model that is already built and
perhaps sharded, for training: every rank reads only the rows that it holds, straight from the safetensors files.
"""

import importlib
import json
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from convert import StoredTensor, read_folder
from convert_map import some
from export import MODEL_MODULES
from quantized_parameters import set_local_values


logger = logging.getLogger(__name__)

# Fields that make the same weights another function.
CONFIG_FIELDS = (
    *("model_type", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "num_attention_heads"),
    *("num_key_value_heads", "num_experts_per_tok"),
)


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ValueError: no such folder, no readable config in it.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ValueError(f"{os.fspath(folder)!r}: no such folder.")
    if not path.is_file():
        raise ValueError(f"{path} is missing: give a folder that holds a model.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def project_architecture(folder: str | os.PathLike) -> str:
    """The architecture of a folder, a key of export.MODEL_MODULES.

    Raises:
        ValueError: not a folder with a model of this project.
    """
    architectures = read_config(folder).get("architectures")
    if not architectures or architectures[0] not in MODEL_MODULES:
        raise ValueError(
            f"{os.fspath(folder)!r} holds {architectures}, not one of {', '.join(MODEL_MODULES)}: convert it first "
            "(python convert.py hf-to-te FOLDER NEW_FOLDER)."
        )
    return architectures[0]


def load_model(
    folder: str | os.PathLike, device: torch.device, dtype: torch.dtype | str = "auto", **config_kwargs: Any
) -> PreTrainedModel:
    """A whole model of this project, in evaluation mode.

    Args:
        folder: config.json and safetensors.
        device: where it goes.
        dtype: of the parameters; ``auto``: as stored.
        config_kwargs: config fields to override, such as ``te_backend`` or ``attn_input_format``.

    Raises:
        ValueError: not a folder of this project's models, or weights that do not fit its config.
    """
    architecture = project_architecture(folder)
    read_folder(Path(folder))  # its errors name the damaged file; transformers' do not
    model_class = getattr(importlib.import_module(MODEL_MODULES[architecture]), architecture)
    model, report = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True, **config_kwargs)
    problems = {kind: report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[kind]}
    if problems:
        listed = "; ".join(
            f"{kind.replace('_', ' ')}: {some(sorted(map(str, keys)))}" for kind, keys in problems.items()
        )
        raise ValueError(f"the weights in {os.fspath(folder)!r} do not fit its config.json: {listed}.")
    return model.to(device).eval()


def load_weights(model: nn.Module, folder: str | os.PathLike) -> None:
    """Fills every parameter from the folder, in place, cast to the parameter's dtype.

    Args:
        model: materialised; plain, or sharded by FSDP2. Every rank calls it.
        folder: of a model with the same parameters.

    Raises:
        ValueError: names the parameters that are missing, extra or of another shape; a damaged file.
    """
    tensors = {name: tensor for name, tensor in read_folder(Path(folder)).items() if not name.endswith("_extra_state")}
    parameters = dict(model.named_parameters())  # a tied head counts once, as the embedding
    _check_same(parameters, tensors, model, folder)
    _report_other_config(model, folder)
    with ExitStack() as stack, torch.no_grad():
        files = {
            path: stack.enter_context(safe_open(path, framework="pt"))
            for path in {tensors[name].path for name in parameters}
        }
        for name, parameter in parameters.items():
            _fill(parameter, files[tensors[name].path].get_slice(name))


def _fill(parameter: nn.Parameter, stored: Any) -> None:
    """Copies this rank's part of a stored tensor (a safetensors slice) into a parameter."""
    like = {"device": parameter.device, "dtype": parameter.dtype}
    if not isinstance(parameter, DTensor):
        set_local_values(parameter, stored[:].to(**like))
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    # Exactly these: FSDP2's strided shards (of a dim that is sharded twice) are a subclass, and not one slice.
    if all(type(placement) in (Shard, Replicate) for placement in placements):
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        if all(shape):
            index = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            set_local_values(parameter, stored[index].to(**like))
        return
    replicated = DTensor.from_local(stored[:].to(**like), mesh, [Replicate()] * mesh.ndim, run_check=False)
    set_local_values(parameter, replicated.redistribute(placements=placements).to_local())


def _check_same(
    parameters: dict[str, nn.Parameter], tensors: dict[str, StoredTensor], model: nn.Module, folder: str | os.PathLike
) -> None:
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - parameters.keys()
    problems = []
    if missing := [name for name in parameters if name not in tensors]:
        problems.append(f"missing: {some(missing)}")
    if extra := [name for name in tensors if name not in parameters and name not in tied]:
        problems.append(f"not in the model: {some(extra)}")
    if wrong := [
        f"{name} is {list(tensors[name].shape)}, in the model {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in tensors and tensors[name].shape != tuple(parameter.shape)
    ]:
        problems.append(f"other shapes: {some(wrong)}")
    if not problems:
        return
    hint = "set config_name_or_path to the same folder, or use its config's values in config_kwargs."
    if missing == ["lm_head.weight"]:
        hint = "its embeddings are tied: set +config_kwargs.tie_word_embeddings=true."
    elif any(".self_attn." in name for name in extra):
        hint = "it is in Hugging Face's layout: convert it first (python convert.py hf-to-te FOLDER NEW_FOLDER)."
    raise ValueError(
        f"init_from_pretrained={os.fspath(folder)!r} does not hold this model's parameters; "
        + "; ".join(problems)
        + f". {hint[0].upper()}{hint[1:]}"
    )


def _report_other_config(model: nn.Module, folder: str | os.PathLike) -> None:
    """Warns where the run's config gives the same weights another meaning: allowed (a longer context), never silent."""
    stored, current = type(model.config).from_dict(read_config(folder)), model.config
    changed = [
        f"{name}: {getattr(stored, name, None)} -> {getattr(current, name, None)}"
        for name in CONFIG_FIELDS
        if getattr(stored, name, None) != getattr(current, name, None)
    ]
    if changed:
        logger.warning("the run changes the config of %s: %s", os.fspath(folder), "; ".join(changed))
