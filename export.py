"""The final model: its weights, and its code, so that ``AutoModel`` loads them where this project is not.

    AutoModelForCausalLM.from_pretrained("final_model", trust_remote_code=True)

transformers copies the file that ``auto_map`` in config.json names, and whatever that file imports by lines
``from .name import ...``, into a package of its own; it knows no sub-packages. So the model's module and all modules of
this project that it needs are written side by side, ``te_reference/attention.py`` as ``te_reference_attention.py``,
and their imports of each other made relative. Nothing else in them changes.
"""

import ast
import json
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from checkpoint import model_tensors
from commits import sync_to_disk
from distributed import nothing, own_rank, together, unwrap
from quantized_parameters import dequantized


logger = logging.getLogger(__name__)

PROJECT_DIR = Path(__file__).resolve().parent
MODEL_MODULES = {"NVLlamaForCausalLM": "modeling_llama_te", "NVMixtralForCausalLM": "modeling_mixtral_te"}
"""Where each architecture of this project is defined."""
# Auto class -> what follows the family's name (NVLlama) in the class that it loads.
AUTO_CLASSES = {
    "AutoConfig": "Config",
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
}
# Fields of a model config that say how a run computes, not what the model is.
RUN_FIELDS = (
    *("attn_input_format", "self_attn_mask_type", "te_backend", "activation_checkpointing"),
    *("expert_token_alignment", "fused_grouped_mlp"),
)
# Imported only where they are. transformers demands every package that a file imports outside a try block.
OPTIONAL_PACKAGES = ("triton", "transformer_engine")


def save_final_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike) -> None:
    """Writes safetensors (several files above 5 GB), ``config.json``, the model's code and the tokenizer.

    The folder loads by ``from_pretrained`` of the model's class, and of ``AutoModelForCausalLM`` and the like with
    ``trust_remote_code=True``.

    Every rank calls it. Weights keep their dtype; quantised ones become the values that the model computed with.
    Sharded ones are gathered one by one into rank 0's CPU memory. An existing folder is replaced once the new one is
    whole.

    Args:
        model: a Hugging Face model: plain, DDP or FSDP2.
        path: the folder to make.

    Raises:
        RuntimeError: on every rank, if rank 0 could not write.
    """
    path, model = Path(path).absolute(), unwrap(model)
    weights = {}
    for name, weight in model_tensors(model).items():
        weight = dequantized(weight)
        # A collective: on every rank, in this order.
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if own_rank() == 0:
            weights[name] = full.cpu()
        del full

    def write() -> None:
        staging, replaced = path.with_name(f"{path.name}.staging"), path.with_name(f"{path.name}.replaced")
        for leftover in (staging, replaced):
            leftover.unlink() if leftover.is_file() else shutil.rmtree(leftover, ignore_errors=True)
        model.save_pretrained(staging, state_dict=weights, max_shard_size="5GB")
        if (architecture := project_architecture(model)) is not None:
            write_model_code(staging, architecture, without=RUN_FIELDS)
        tokenizer.save_pretrained(staging)
        for file in staging.iterdir():
            sync_to_disk(file)
        if path.exists():
            os.rename(path, replaced)
        os.rename(staging, path)
        shutil.rmtree(replaced, ignore_errors=True)

    what = f"the final model cannot be written to {path}: make room, or make the folder writable"
    together(write if own_rank() == 0 else nothing, RuntimeError, what)
    if own_rank() == 0:
        logger.info("wrote the final model to %s", path)


def write_model_code(folder: Path, architecture: str, without: Collection[str] = ()) -> None:
    """Adds the model's code to a folder of weights, and the ``auto_map`` to its config.json.

    Args:
        folder: with a config.json.
        architecture: a key of MODEL_MODULES.
        without: fields to drop from the config.json.
    """
    module = MODEL_MODULES[architecture]
    for name, source in model_sources(module).items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    tree = ast.parse(_module_file(module).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    family = architecture.removesuffix("ForCausalLM")
    auto_map = {
        auto_class: f"{module}.{family}{suffix}"
        for auto_class, suffix in AUTO_CLASSES.items()
        if f"{family}{suffix}" in defined
    }
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in without}
    config["auto_map"] = auto_map
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def project_architecture(model: PreTrainedModel) -> str | None:
    """Which of MODEL_MODULES the model is; None: Hugging Face's own. FSDP2 makes a subclass of a model's class."""
    names = (c.__name__ for c in type(model).__mro__ if MODEL_MODULES.get(c.__name__) == c.__module__)
    return next(names, None)


def model_sources(module: str) -> dict[str, str]:
    """The source of a module and of all that it imports from this project, by flat name."""
    sources: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if _flat(name) not in sources:
            source = _module_file(name).read_text(encoding="utf-8")
            sources[_flat(name)], needed = _with_relative_imports(name, source)
            waiting += needed
    return sources


def _with_relative_imports(name: str, source: str) -> tuple[str, list[str]]:
    """The rewritten source of module ``name``, and the modules of this project that it imports."""
    lines: list[str | None] = list(source.splitlines())
    needed: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            replacement, modules = _rewritten(node)
            needed += modules
            if replacement:
                indented = [" " * node.col_offset + line for line in replacement]
                # In place of the first line, so that the other nodes keep their line numbers.
                lines[node.lineno - 1] = "\n".join(indented)
                lines[node.lineno : node.end_lineno] = [None] * (node.end_lineno - node.lineno)
    header = f"# {name} of the training project, with relative imports: see export.py there."
    return "\n".join([header, *(line for line in lines if line is not None)]) + "\n", needed


def _rewritten(node: ast.Import | ast.ImportFrom) -> tuple[list[str], list[str]]:
    """The lines that replace an import (none: it stays), and the modules of this project in it."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
    if modules[0].partition(".")[0] in OPTIONAL_PACKAGES:
        return ["try:", f"    {ast.unparse(node)}", "finally:", "    pass"], []
    if not any(_is_ours(module) for module in modules):
        return [], []
    if isinstance(node, ast.Import):
        assert len(modules) == 1 and "." not in modules[0], f"export.py cannot rewrite {ast.unparse(node)!r}"
        return _module_import(modules[0], node.names[0].asname or modules[0]), modules
    lines, plain = [], []
    for alias in node.names:
        if _is_ours(submodule := f"{node.module}.{alias.name}"):
            lines += _module_import(submodule, alias.asname or alias.name)
            modules.append(submodule)
        else:
            plain.append(ast.unparse(alias))
    if plain:
        lines.append(f"from .{_flat(node.module)} import {', '.join(plain)}")
    return lines, modules


def _module_import(module: str, name: str) -> list[str]:
    # transformers sees which files to copy by the first form only.
    flat = _flat(module)
    return [f"from .{flat} import __name__ as _", f"from . import {flat} as {name}"]


def _is_ours(module: str) -> bool:
    return _module_file(module).is_file()


def _module_file(module: str) -> Path:
    path = PROJECT_DIR.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


def _flat(module: str) -> str:
    return module.replace(".", "_")
