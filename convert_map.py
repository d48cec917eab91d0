"""Which rows of which Hugging Face weights make up each TransformerEngine (TE) weight, and back. Llama and Mixtral.

Legend: V vocabulary, D model width, N query heads, K KV heads, R = N / K, H head dim, F FFN width, E experts.

Both sides hold the same numbers in different tensors. See a tensor [..., L] as a matrix of rows of L elements: then
every tensor of one side is a sequence of row ranges of the other side's, and a conversion never looks at a number.
Below
``model.layers.{i}.``, TE on the left (``self_attention`` shortened to ``attn``)::

    attn.layernorm_qkv.layer_norm_weight [D]    = input_layernorm.weight
    attn.layernorm_qkv.weight [(N+2K)H, D]      = per KV head: R*H rows of self_attn.q_proj, H of k_proj, H of v_proj
    attn.proj.weight [D, N*H]                   = self_attn.o_proj
  Llama
    layernorm_mlp.layer_norm_weight [D]         = post_attention_layernorm.weight
    layernorm_mlp.fc1_weight [2F, D]            = mlp.gate_proj, mlp.up_proj
    layernorm_mlp.fc2_weight [D, F]             = mlp.down_proj
  Mixtral                                         transformers 4 files                         transformers 5 modules
    mlp.gate.weight [E, D]                      = block_sparse_moe.gate.weight               | mlp.gate.weight
    mlp.experts.fc1_weight [E, 2F, D]           = per expert: experts.{e}.w1, experts.{e}.w3 | mlp.experts.gate_up_proj
    mlp.experts.fc2_weight [E, D, F]            = per expert: experts.{e}.w2                 | mlp.experts.down_proj

The embedding, the head and all other norms keep their names. The table is written once, towards TE; the way back is the
same table read the other way, so a round trip returns the same bytes, of whatever dtype.
Sources: transformer_engine/pytorch/attention/multi_head_attention.py (interleaved QKV rows),
transformers/models/{llama,mixtral}/modeling_*.py, transformers/conversion_mapping.py.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig


HF_TO_TE, TE_TO_HF = "hf-to-te", "te-to-hf"
MODEL_TYPES = ("llama", "mixtral")
LAYOUTS = ("transformers4", "transformers5")  # of Mixtral's Hugging Face side; every reader of files knows the first
# Tensors that are no weights: RoPE tables that old transformers saved; TE's FP8 scaling state.
IGNORED_KEYS = {HF_TO_TE: re.compile(r"\.rotary_emb\.inv_freq$"), TE_TO_HF: re.compile(r"(^|\.)_extra_state$")}


class Rows(NamedTuple):
    """``count`` rows of tensor ``key`` from row ``first`` on."""

    key: str
    first: int
    count: int


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorMap:
    """Every target tensor as row ranges, in order, that together use every row of every source tensor once."""

    source_shapes: Shapes
    target_shapes: Shapes
    rows: dict[str, list[Rows]]

    def inverted(self) -> "TensorMap":
        """The way back."""
        found: dict[str, list[tuple[int, Rows]]] = {key: [] for key in self.source_shapes}
        for key, parts in self.rows.items():
            position = 0
            for part in parts:
                found[part.key].append((part.first, Rows(key, position, part.count)))
                position += part.count
        rows = {key: [part for _, part in sorted(parts)] for key, parts in found.items()}
        return TensorMap(self.target_shapes, self.source_shapes, rows)


def num_rows(shape: tuple[int, ...]) -> int:
    """Rows of a tensor of this shape; a vector is one."""
    return math.prod(shape[:-1])


def hf_to_te_map(config: PreTrainedConfig, layout: str = "transformers4", lm_head: bool = True) -> TensorMap:
    """The table above for one model.

    Args:
        config: a Llama or Mixtral config, Hugging Face's or this project's.
        layout: of Mixtral's Hugging Face side: ``transformers4`` (a tensor per expert, what files hold) or
            ``transformers5`` (experts stacked, what its modules hold). Llama has one layout.
        lm_head: whether there is a ``lm_head.weight``; tied models may do without.

    Raises:
        ValueError: another model type or layout, biases, heads that cannot be grouped.
    """
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"model_type={config.model_type!r}: only {' and '.join(MODEL_TYPES)} can be converted.")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}.")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise ValueError("attention_bias or mlp_bias is set in the config: the TE layers have no place for biases.")
    D, F, V, N = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_attention_heads
    K, H = config.num_key_value_heads or N, getattr(config, "head_dim", None) or D // N
    if N % K:
        raise ValueError(f"num_attention_heads={N} is not divisible by num_key_value_heads={K}: choose a divisor.")
    R = N // K
    hf: Shapes = {}
    te: Shapes = {}
    rows: dict[str, list[Rows]] = {}

    def put(te_key: str, te_shape: tuple[int, ...], hf_shapes: Shapes, parts: Iterable[Rows] | None = None) -> None:
        """Adds a TE tensor: ``parts``, or all of the Hugging Face tensors one after another."""
        hf.update(hf_shapes)
        te[te_key] = te_shape
        rows[te_key] = list(parts or (Rows(key, 0, num_rows(shape)) for key, shape in hf_shapes.items()))

    put("model.embed_tokens.weight", (V, D), {"model.embed_tokens.weight": (V, D)})
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        attention = f"{layer}self_attention."
        norm, norm_2 = f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"
        q, k, v, o = (f"{layer}self_attn.{name}_proj.weight" for name in "qkvo")
        put(f"{attention}layernorm_qkv.layer_norm_weight", (D,), {norm: (D,)})
        put(
            f"{attention}layernorm_qkv.weight",
            ((N + 2 * K) * H, D),
            {q: (N * H, D), k: (K * H, D), v: (K * H, D)},
            (
                part
                for head in range(K)
                for part in (Rows(q, head * R * H, R * H), Rows(k, head * H, H), Rows(v, head * H, H))
            ),
        )
        put(f"{attention}proj.weight", (D, N * H), {o: (D, N * H)})
        if config.model_type == "llama":
            mlp = f"{layer}layernorm_mlp."
            gate, up, down = (f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
            put(f"{mlp}layer_norm_weight", (D,), {norm_2: (D,)})
            put(f"{mlp}fc1_weight", (2 * F, D), {gate: (F, D), up: (F, D)})
            put(f"{mlp}fc2_weight", (D, F), {down: (D, F)})
            continue
        E, mlp = config.num_local_experts, f"{layer}mlp."
        moe = f"{layer}block_sparse_moe." if layout == "transformers4" else mlp
        put(norm_2, (D,), {norm_2: (D,)})
        put(f"{mlp}gate.weight", (E, D), {f"{moe}gate.weight": (E, D)})
        if layout == "transformers4":
            fc1 = {f"{moe}experts.{e}.{name}.weight": (F, D) for e in range(E) for name in ("w1", "w3")}
            fc2 = {f"{moe}experts.{e}.w2.weight": (D, F) for e in range(E)}
        else:
            fc1 = {f"{moe}experts.gate_up_proj": (E, 2 * F, D)}
            fc2 = {f"{moe}experts.down_proj": (E, D, F)}
        put(f"{mlp}experts.fc1_weight", (E, 2 * F, D), fc1)
        put(f"{mlp}experts.fc2_weight", (E, D, F), fc2)
    put("model.norm.weight", (D,), {"model.norm.weight": (D,)})
    if lm_head:
        put("lm_head.weight", (V, D), {"lm_head.weight": (V, D)})
    return TensorMap(hf, te, rows)


def some(items: Iterable[str], shown: int = 4) -> str:
    """The first few of a list, for a message, and how many there are."""
    items = list(items)
    return ", ".join(items[:shown]) + (f", ... ({len(items)} in all)" if len(items) > shown else "")


def plan(direction: str, tensors: Mapping[str, Any], config: PreTrainedConfig, layout: str) -> TensorMap:
    """The table for these tensors, once they are exactly the model's.

    Args:
        direction: HF_TO_TE or TE_TO_HF.
        tensors: anything with ``shape`` and ``dtype``, by key; those of IGNORED_KEYS are passed over.
        config: of the model.
        layout: of Mixtral's Hugging Face side where that is the target; as a source it is told by its keys.

    Raises:
        ValueError: names the keys that are missing, not the model's, of another shape, or of another dtype than those
            they share a target with.
    """
    tensors = {key: tensor for key, tensor in tensors.items() if not IGNORED_KEYS[direction].search(key)}
    if direction == HF_TO_TE:
        layout = LAYOUTS[0] if any(".block_sparse_moe." in key for key in tensors) else LAYOUTS[1]
    table = hf_to_te_map(config, layout, lm_head=not config.tie_word_embeddings or "lm_head.weight" in tensors)
    if direction == TE_TO_HF:
        table = table.inverted()
    expected, problems = table.source_shapes, []
    if missing := [key for key in expected if key not in tensors]:
        problems.append(f"missing keys: {some(missing)}")
    if unexpected := [key for key in tensors if key not in expected]:
        problems.append(f"unexpected keys: {some(unexpected)}")
    both = [key for key in expected if key in tensors]
    if wrong := [key for key in both if tuple(tensors[key].shape) != expected[key]]:
        shapes = (f"{key} is {list(tensors[key].shape)}, by the config {list(expected[key])}" for key in wrong)
        problems.append(f"wrong shapes: {some(shapes)}")
    for target, parts in table.rows.items():
        keys = dict.fromkeys(part.key for part in parts if part.key in tensors)
        if len({tensors[key].dtype for key in keys}) > 1:
            dtypes = some(f"{key} is {tensors[key].dtype}" for key in keys)
            problems.append(f"{target} holds one dtype: {dtypes}; cast them to one first")
    if problems:
        what = f"not the weights of a {config.model_type} model for {direction}"
        raise ValueError(f"{what}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return table


def check_tied(
    config: PreTrainedConfig, tensors: Mapping[str, Any], equal: Callable[[Any, Any], bool] = torch.equal
) -> None:
    """A tied head that is stored all the same must be the embedding: readers would disagree on which one counts.

    Raises:
        ValueError: it is not.
    """
    head = tensors.get("lm_head.weight")
    if config.tie_word_embeddings and head is not None and not equal(head, tensors["model.embed_tokens.weight"]):
        raise ValueError(
            "lm_head.weight differs from model.embed_tokens.weight but the config has tie_word_embeddings=true: "
            "set it to false, or remove lm_head.weight."
        )


def converted(table: TensorMap, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The targets one by one, each in memory of its own."""
    for key, parts in table.rows.items():
        sources = (tensors[part.key].detach() for part in parts)
        pieces = [
            source.reshape(-1, source.shape[-1])[part.first : part.first + part.count]
            for source, part in zip(sources, parts, strict=True)
        ]
        yield key, torch.cat(pieces).view(table.target_shapes[key])
