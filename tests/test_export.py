"""The model code written next to exported weights; that it loads elsewhere is in test_generation.py."""

import ast

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import export
from dist_utils import run_on_ranks
from modeling_llama_te import NVLlamaConfig, NVLlamaForCausalLM


SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def rewritten(source: str) -> list[str]:
    return export._with_relative_imports("module", source)[0].splitlines()[1:]


def test_imports_of_this_project_become_relative():
    source = """import te_backend
from te_reference import optimizers
def f():
    from te_reference.modules import (
        Linear,
        RMSNorm as Norm,
    )
    return Norm
"""
    assert rewritten(source) == [
        "from .te_backend import __name__ as _",
        "from . import te_backend as te_backend",
        "from .te_reference_optimizers import __name__ as _",
        "from . import te_reference_optimizers as optimizers",
        "def f():",
        "    from .te_reference_modules import Linear, RMSNorm as Norm",
        "    return Norm",
    ]


def test_other_imports_stay_and_optional_packages_are_not_demanded():
    assert rewritten("import torch\nfrom torch import nn\nimport torch.nn.functional as F\n") == [
        "import torch",
        "from torch import nn",
        "import torch.nn.functional as F",
    ]
    lines = ["try:", "    import triton.language as tl", "finally:", "    pass"]
    assert rewritten("import triton.language as tl\n") == lines


def test_no_module_is_left_behind():
    sources = export.model_sources("modeling_llama_te")
    assert {"modeling_llama_te", "loss", "te_backend", "te_reference", "te_reference_inference"} <= set(sources)
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert not export._is_ours(node.module), node.module
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.module in sources, node.module
            elif isinstance(node, ast.Import):
                assert not any(export._is_ours(alias.name) for alias in node.names), ast.unparse(node)


def _architectures() -> list[str | None]:
    models = [
        NVLlamaForCausalLM(NVLlamaConfig(**SIZES, te_backend="reference")),
        LlamaForCausalLM(LlamaConfig(**SIZES)),
    ]
    for model in models:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return [export.project_architecture(model) for model in models]


def test_a_sharded_model_is_what_it_was():
    """FSDP2 gives it a class of another name."""
    assert run_on_ranks(_architectures, 2) == [["NVLlamaForCausalLM", None]] * 2
