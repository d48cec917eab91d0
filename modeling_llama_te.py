"""Llama 3 on TransformerEngine layers.

Legend: B batch, S sequence, T packed tokens, D model width, H head dim, V vocabulary.

The model is Hugging Face's Llama with every decoder layer replaced by one fused ``TransformerLayer`` of the backend
that ``config.te_backend`` names. Two batch layouts: BSHD (``input_ids`` [B, S], padded on the right; a causal mask
keeps real tokens from seeing the padding) and THD (``input_ids`` [1, T], documents back to back, ``cu_seq_lens_*``).
The module holds no buffer: the RoPE table is computed on first use, so a cast or ``to_empty`` cannot corrupt it.
"""

import functools
import math
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import te_backend
from generation import CachedGenerationMixin, takes_padded_batches
from loss import IGNORE_INDEX, linear_cross_entropy
from phases import phase
from precision import PrecisionPlan


# RoPE types whose angles depend on the position alone and that leave cos and sin unscaled -> their numbers, besides
# rope_theta.
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class NVLlamaConfig(LlamaConfig):
    """``LlamaConfig`` plus how its layers run.

    Args:
        attn_input_format: ``bshd`` (padded batches) or ``thd`` (packed batches).
        self_attn_mask_type: ``causal`` for bshd, ``padding_causal`` for thd; None follows the format.
        te_backend: ``auto``, ``transformer_engine`` or ``reference`` (see te_backend.py).
        activation_checkpointing: which layers are recomputed in the backward pass, see :func:`recomputed_layers`.
    """

    def __init__(
        self,
        attn_input_format: str = "bshd",
        self_attn_mask_type: str | None = None,
        te_backend: str = "auto",
        activation_checkpointing: str = "off",
        **kwargs: Any,
    ):
        self.attn_input_format = attn_input_format
        self.self_attn_mask_type = self_attn_mask_type
        self.te_backend = te_backend
        self.activation_checkpointing = activation_checkpointing
        super().__init__(**kwargs)

    @property
    def attention_mask_type(self) -> str:
        """TE's mask type: the configured one, or the one that the batch layout needs."""
        return self.self_attn_mask_type or ("padding_causal" if self.attn_input_format == "thd" else "causal")

    def problems(self) -> list[str]:
        """Broken rules that the layers rely on."""
        problems = decoder_problems(self)
        if self.attention_bias or self.mlp_bias or self.attention_dropout:
            problems.append("attention_bias, mlp_bias and attention_dropout must be off: Llama's layers have none.")
        return problems

    def check(self) -> None:
        """Raises ValueError with all :meth:`problems`."""
        if problems := self.problems():
            raise ValueError("invalid model config:\n" + "\n".join(f"  - {problem}" for problem in problems))


@functools.cache
def recomputed_layers(mode: str, num_layers: int) -> frozenset[int]:
    """Indices (from 0) of the layers that keep their input only and run again in the backward pass.

    Args:
        mode: ``off``, ``full``, ``selective`` (every second layer), or a number of layers, spread evenly.
        num_layers: of the model.
    """
    if mode in ("off", "full", "selective"):
        return frozenset({"off": (), "full": range(num_layers), "selective": range(0, num_layers, 2)}[mode])
    return frozenset(k * num_layers // int(mode) for k in range(int(mode)))


def decoder_problems(config: PretrainedConfig) -> list[str]:
    """Broken rules of the fields that Llama's and Mixtral's layers share."""
    problems = []
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in (*sizes, "num_key_value_heads", "head_dim"):
        value = getattr(config, name)
        if not (value is None or (isinstance(value, int) and value >= 1)):
            problems.append(f"{name}={value!r} must be a whole number of at least 1.")
    if problems:
        return problems
    mode = config.activation_checkpointing
    if mode not in ("off", "full", "selective") and not (mode.isdecimal() and int(mode) <= config.num_hidden_layers):
        problems.append(
            f"activation_checkpointing={mode!r} is none of off, full, selective, nor a number of layers from 0 to "
            f"{config.num_hidden_layers}."
        )
    if config.head_dim is not None and config.head_dim % 2:
        problems.append(f"head_dim={config.head_dim} is odd: RoPE rotates halves.")
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            f"num_attention_heads={config.num_attention_heads} is not divisible by num_key_value_heads="
            f"{config.num_key_value_heads}: choose a divisor."
        )
    if config.head_dim is None and config.hidden_size % config.num_attention_heads:
        problems.append(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads}: "
            "change one, or give head_dim."
        )
    if config.attn_input_format not in ("bshd", "thd"):
        problems.append(f"attn_input_format={config.attn_input_format!r} is neither bshd nor thd.")
    if config.hidden_act != "silu":
        problems.append(f"hidden_act={config.hidden_act!r}: the layers have SwiGLU (silu) only.")
    if not _is_positive(config.rms_norm_eps):
        problems.append(f"rms_norm_eps={config.rms_norm_eps!r} must be a number above 0.")
    return problems + rope_problems(config.rope_parameters)


def rope_problems(parameters: dict[str, Any]) -> list[str]:
    """Broken rules of a config's ``rope_parameters``."""
    rope_type = parameters.get("rope_type")
    if rope_type not in list(ROPE_FIELDS):
        return [
            f"rope_parameters={parameters}: rope_type={rope_type!r}: the layers have {', '.join(ROPE_FIELDS)} RoPE."
        ]
    problems = [
        f"rope_parameters={parameters}: {name}={parameters.get(name)!r} must be a number above 0, for {rope_type} RoPE."
        for name in ("rope_theta", *ROPE_FIELDS[rope_type])
        if not _is_positive(parameters.get(name))
    ]
    if not problems and rope_type == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        problems.append(f"rope_parameters={parameters}: low_freq_factor must be below high_freq_factor.")
    if parameters.get("partial_rotary_factor") not in (None, 1):
        problems.append(f"rope_parameters={parameters}: the layers rotate whole heads: drop partial_rotary_factor.")
    return problems


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


class RotaryTable:
    """RoPE angles [S, 1, 1, H] FP32 for a model config, Llama 3 scaling included; computed once per length and
    device."""

    def __init__(self, config: PretrainedConfig, te: Any):
        self._te, self._config = te, config
        self._table: torch.Tensor | None = None

    def __call__(self, num_positions: int, device: torch.device) -> torch.Tensor:
        """Angles for at least ``num_positions`` positions."""
        if self._table is None or self._table.shape[0] < num_positions or self._table.device != device:
            rope = self._te.RotaryPositionEmbedding(self._config.head_dim)
            rope.inv_freq = self._inverse_frequencies().to(device)
            # Training must be able to save what generation under inference_mode has made.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
                self._table = rope(num_positions)
        return self._table

    def _inverse_frequencies(self) -> torch.Tensor:
        """[H / 2] FP32, from Hugging Face's formulas."""
        rope_type = self._config.rope_parameters["rope_type"]
        with torch.device("cpu"):
            if rope_type == "default":
                exponents = torch.arange(0, self._config.head_dim, 2, dtype=torch.float32) / self._config.head_dim
                return 1.0 / self._config.rope_parameters["rope_theta"] ** exponents
            inv_freq, _ = ROPE_INIT_FUNCTIONS[rope_type](self._config)
        return inv_freq


class NVLlamaPreTrainedModel(PreTrainedModel):
    config_class = NVLlamaConfig
    base_model_prefix = "model"
    _no_split_modules = ["TransformerLayer"]
    _keys_to_ignore_on_load_missing = [r"_extra_state$"]
    _keys_to_ignore_on_load_unexpected = [r"_extra_state$"]

    def _init_weights(self, module: nn.Module) -> None:
        """Norm weights 1, biases 0, matrices N(0, initializer_range). Training has weight_init.py instead."""
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                init.zeros_(parameter)
            elif parameter.ndim == 1:
                init.ones_(parameter)
            else:
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)


class NVLlamaModel(NVLlamaPreTrainedModel):
    """Embedding, decoder layers, final norm.

    Args:
        precision: the recipe of every layer; None: all run in the parameters' dtype.
    """

    static_decoding = True  # decoding.py knows these layers

    def __init__(self, config: NVLlamaConfig, precision: PrecisionPlan | None = None):
        config.check()
        super().__init__(config)
        te = te_backend.resolve(config.te_backend)
        device, dtype = te_backend.layer_device(), torch.get_default_dtype()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.precision = precision or PrecisionPlan((None,) * config.num_hidden_layers)
        self.layers = nn.ModuleList()
        for index in range(config.num_hidden_layers):
            with self.precision.layer_init(index):
                self.layers.append(self._build_layer(te, index))
        self.norm = te.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, params_dtype=dtype, device=device)
        self.rotary = RotaryTable(config, te)
        self._checkpoint = te.checkpoint
        self.post_init()

    def _build_layer(self, te: Any, index: int) -> nn.Module:
        config = self.config
        return te.TransformerLayer(
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            layernorm_epsilon=config.rms_norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layer_number=index + 1,
            self_attn_mask_type=config.attention_mask_type,
            attn_input_format=config.attn_input_format,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            fuse_qkv_params=True,
            params_dtype=torch.get_default_dtype(),
            device=te_backend.layer_device(),
        )

    @takes_padded_batches
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """[B, S] or [1, T] tokens -> final hidden states [B, S, D] or [1, T, D].

        Args:
            input_ids: int64 tokens; or give ``inputs_embeds`` [..., D].
            kwargs: the batch's other keys, see :meth:`_attention_kwargs`.
        """
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden, layer_kwargs = self._attention_kwargs(hidden, **kwargs)
        with self.precision.region():
            for index, layer in enumerate(self.layers):
                with self.precision.layer(index):
                    hidden = self._run(index, layer, hidden, layer_kwargs)
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden.unsqueeze(0) if hidden.ndim == 2 else hidden)

    def _attention_kwargs(
        self,
        hidden: torch.Tensor,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        cu_seq_lens_q_padded: torch.Tensor | None = None,
        cu_seq_lens_k_padded: torch.Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        pad_between_seqs: bool | None = None,
        inference_params: Any = None,
        is_first_microbatch: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The hidden states as the layers take them, [B, S, D] or [T, D], and the layers' keyword arguments.

        Args:
            hidden: embedded tokens, [B, S, D] or [1, T, D].
            cu_seq_lens_q, cu_seq_lens_k: thd: cumulative real lengths, int32 [documents + 1].
            cu_seq_lens_q_padded, cu_seq_lens_k_padded: thd: offsets in the buffer, where documents are padded apart.
            max_length_q, max_length_k: an upper bound of the lengths; for bshd only where a rank holds chunks of the
                sequences (context_parallel.py): S of the whole sequences.
            pad_between_seqs: thd: whether documents are padded apart; TE must be told, it does not find out by itself.
            is_first_microbatch: low precision: True: quantise the weights and keep them; False: use the kept ones;
                None: keep nothing.
            inference_params: the backend's KV cache, for which the tokens are new; ``past_key_values`` sets it.
            kwargs: the batch's other keys. ``attention_mask``: padding is on the right, where a causal mask hides it;
                elsewhere only in evaluation, see :func:`generation.takes_padded_batches`.
        """
        if self.config.attn_input_format == "thd":
            if cu_seq_lens_q is None:
                raise ValueError(
                    "attn_input_format=thd needs cu_seq_lens_q: pack the batch, or use attn_input_format=bshd."
                )
            hidden = hidden.squeeze(0)  # [T, D]
            layer_kwargs = {
                "cu_seqlens_q": cu_seq_lens_q,
                "cu_seqlens_kv": cu_seq_lens_k,
                "cu_seqlens_q_padded": cu_seq_lens_q_padded,
                "cu_seqlens_kv_padded": cu_seq_lens_k_padded,
                "max_seqlen_q": max_length_q,
                "max_seqlen_kv": max_length_k,
                "pad_between_seqs": bool(pad_between_seqs),
                "rotary_pos_emb": self.rotary(max_length_q, hidden.device),
            }
        else:
            layer_kwargs = {"rotary_pos_emb": self.rotary(max_length_q or hidden.shape[1], hidden.device)}
        if is_first_microbatch is not None:
            layer_kwargs["is_first_microbatch"] = is_first_microbatch
        if inference_params is not None:
            layer_kwargs["inference_params"] = inference_params
            layer_kwargs["rotary_pos_emb"] = self.rotary(inference_params.max_sequence_length, hidden.device)
            if self.config.attn_input_format == "bshd":
                layer_kwargs["self_attn_mask_type"] = "padding_causal"  # TE's KV cache takes no other
        return hidden, layer_kwargs

    def _run(self, index: int, layer: nn.Module, hidden: torch.Tensor, layer_kwargs: dict) -> Any:
        recomputed = recomputed_layers(self.config.activation_checkpointing, self.config.num_hidden_layers)
        with phase(f"forward layer {index + 1}"):
            if torch.is_grad_enabled() and index in recomputed:
                return self._checkpoint(layer, hidden, use_reentrant=False, **layer_kwargs)
            return layer(hidden, **layer_kwargs)


class NVLlamaForCausalLM(CachedGenerationMixin, NVLlamaPreTrainedModel):
    """Llama with a language-model head; in training the logits are never materialised (loss.py)."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NVLlamaConfig, precision: PrecisionPlan | None = None):
        super().__init__(config)
        self.model = NVLlamaModel(config, precision)
        self.lm_head = nn.Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            device=te_backend.layer_device(),
            dtype=torch.get_default_dtype(),
        )
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        output_logits: bool | None = None,
        logits_to_keep: int = 0,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Loss and, when asked for, logits.

        Args:
            input_ids: [B, S] or [1, T].
            labels: unshifted targets, shifted here within each sequence; ignored where ``shift_labels`` is given.
            shift_labels: targets already shifted left within each sequence, -100 = none.
            num_items_in_batch: valid targets of the whole global batch: loss = sum of -log p / this. None: of this
                call.
            output_logits: None: only without labels.
            logits_to_keep: logits of the last n positions only; 0: all.
            attention_mask: 1 = token, 0 = padding: [B, S] or [1, T].
            kwargs: the batch's other keys, see :meth:`NVLlamaModel.forward`.
        """
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        if shift_labels is None and labels is not None:
            shift_labels = shift_within_sequences(
                labels, kwargs.get("cu_seq_lens_q_padded", kwargs.get("cu_seq_lens_q"))
            )
        loss = logits = None
        if shift_labels is not None:
            loss = linear_cross_entropy(
                hidden.flatten(0, 1), self.lm_head.weight, shift_labels.flatten(), num_items_in_batch
            )
        if output_logits or (output_logits is None and loss is None):
            logits = self.lm_head(hidden[:, -logits_to_keep:])
        return CausalLMOutput(loss=loss, logits=logits)


class NVLlamaForSequenceClassification(GenericForSequenceClassification, NVLlamaPreTrainedModel):
    """``config.num_labels`` scores of a sequence, from its last token that is not ``config.pad_token_id``."""

    def __init__(self, config: NVLlamaConfig):
        NVLlamaPreTrainedModel.__init__(self, config)  # the generic one would look the model up in transformers
        self.num_labels = config.num_labels
        self.model = NVLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False, dtype=torch.get_default_dtype())
        self.post_init()


class NVLlamaForTokenClassification(GenericForTokenClassification, NVLlamaPreTrainedModel):
    """``config.num_labels`` scores of every token; ``config.classifier_dropout`` (0.1) before the head."""

    def __init__(self, config: NVLlamaConfig):
        NVLlamaPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = NVLlamaModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels, dtype=torch.get_default_dtype())
        self.post_init()


def __getattr__(name: str) -> Any:
    """``from modeling_llama_te import InferenceParams``: that of the backend which ``te_backend=auto`` chooses here."""
    if name == "InferenceParams":
        return te_backend.resolve("auto").InferenceParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def shift_within_sequences(labels: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Labels shifted left by one; the last position of every sequence predicts nothing.

    Args:
        labels: [B, S], or [1, T] with ``offsets``.
        offsets: buffer offsets of the packed documents, [documents + 1]; None: each row is one sequence.
    """
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    if offsets is not None:
        last = offsets[1:].long() - 1
        shifted[:, last[last >= 0]] = IGNORE_INDEX
    return shifted
