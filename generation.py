"""Padded batches and generation with a KV cache, for the models of this project through transformers' ``generate``.

Legend: B sequences, S columns of a padded batch, W longest sequence, T packed tokens, D model width.

Layouts. Users hand over rows [B, S] with padding on either side; the layers take packed tokens (thd) or rows padded on
the right (bshd). :class:`PaddedBatch` moves the real tokens from one to the other and back, so padding is never
attended to, gets no position, and in thd costs no computation.

Cache. transformers' loop chooses the tokens; it holds a :class:`KVCache`, which stands for the ``InferenceParams`` of
the backend. A step hands over the columns that the cache has not seen: first the prompts, then one column at a time.
Each sequence's keys lie in its own row from position 0 on, whatever padding its prompt had.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

import te_backend
from decoding import WINDOW_MULTIPLE, DecodeStep


# What transformers' loop calls the cache: "cache" from 5.24 on, "past_key_values" before.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
# flash-attention's kernel for TE's cache wants the room per sequence in multiples of this.
CACHE_LENGTH_MULTIPLE = 256


class PaddedBatch:
    """Where the real tokens of a padded batch are."""

    def __init__(self, mask_BS: torch.Tensor, packed: bool):
        """
        Args:
            mask_BS: bool, True = token. Padding may be anywhere in a row.
            packed: to thd; False: to bshd. Synchronises with the device either way.
        """
        self._mask_BS, self._packed = mask_BS, packed
        self.lengths: list[int] = mask_BS.sum(dim=1).tolist()
        if not packed:
            order_BS = torch.argsort(~mask_BS, dim=1, stable=True)  # real tokens first, in their order
            self._index_BW = order_BS[:, : max(self.lengths)]

    def pack(self, x_BS: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] -> [1, T, ...] (thd) or [B, W, ...] with what was padding on the right (bshd)."""
        if self._packed:
            return x_BS[self._mask_BS].unsqueeze(0)
        return x_BS.gather(1, self._expanded(x_BS))

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The way back, [1, T, D] or [B, W, D] -> [B, S, D]; rows of padding mean nothing."""
        out_BSD = packed.new_zeros(*self._mask_BS.shape, packed.shape[-1])
        if self._packed:
            out_BSD[self._mask_BS] = packed[0]
            return out_BSD
        return out_BSD.scatter(1, self._expanded(packed), packed)

    def batch_keys(self) -> dict[str, Any]:
        """What goes with the packed tokens into the model: the keys of collator.Batch."""
        if not self._packed:
            return {"attention_mask": self._mask_BS.gather(1, self._index_BW).long()}
        return thd_keys(self.lengths, self._mask_BS.device)

    def _expanded(self, like: torch.Tensor) -> torch.Tensor:
        index = self._index_BW if like.ndim == 2 else self._index_BW.unsqueeze(-1)
        return index.expand(*self._index_BW.shape, *like.shape[2:])


def thd_keys(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """The keys of collator.Batch that describe packed sequences of these lengths."""
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}


class KVCache:
    """The ``InferenceParams`` of a backend, as transformers' generation loop wants a cache.

    Attributes:
        params: the backend's ``InferenceParams``.
        num_columns: columns of the padded batch that went in, padding included.
        lengths: real tokens of every sequence.
    """

    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self, params: Any):
        """
        Raises:
            ValueError: ``params`` holds sequences already; TransformerEngine cannot continue them with a prompt.
        """
        if params.sequences:
            raise ValueError(
                f"this InferenceParams holds {len(params.sequences)} sequences of an earlier call: call its reset() "
                "first, and give whole prompts."
            )
        self.params = params
        self.num_columns = 0
        self.lengths: list[int] = []
        self._decode_keys: dict[str, Any] | None = None
        self._decode_step: DecodeStep | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that need not be computed again."""
        return self.num_columns

    def begin_prompt(self, lengths: list[int], num_columns: int, thd: bool, num_heads: int) -> None:
        """Room for new sequences of these lengths.

        Args:
            lengths: real tokens of each.
            num_columns: of the padded batch.
            thd: the layers take packed tokens.
            num_heads: query heads of a layer.

        Raises:
            ValueError: an empty sequence, or too little room.
        """
        params = self.params
        if 0 in lengths:
            raise ValueError(f"prompt {lengths.index(0)} of the batch has no token: give it at least the BOS token.")
        if len(lengths) > params.max_batch_size:
            raise ValueError(
                f"{len(lengths)} sequences exceed InferenceParams.max_batch_size={params.max_batch_size}: make it "
                "batch size * max(num_beams, num_return_sequences)."
            )
        self._require_room(max(lengths))
        if thd:
            longest = getattr(params, "max_ctx_len", None)
            if longest is None or max(lengths) > longest:
                raise ValueError(
                    f"a prompt of {max(lengths)} tokens with InferenceParams.max_ctx_len={longest}: a model with "
                    "attn_input_format=thd needs InferenceParams(qkv_format='thd', max_ctx_len=longest prompt)."
                )
            # TE 2.20.2 (FusedAttention.forward) takes the heads of packed queries for the batch, and cuts cu_seqlens
            # to so many sequences. Until it does not.
            if type(params).__module__.startswith("transformer_engine") and len(lengths) > num_heads:
                raise ValueError(
                    f"{len(lengths)} sequences: TransformerEngine's KV cache takes at most num_attention_heads="
                    f"{num_heads} in thd. Load the model with attn_input_format='bshd'."
                )
        self._begin(lengths, num_columns)

    def begin_decode(self, device: torch.device) -> dict[str, Any]:
        """One more token of every sequence; returns the batch keys of a thd model."""
        self._require_room(max(self.lengths) + 1)
        self._begin([1] * len(self.lengths), 1)
        if self._decode_keys is None:
            self._decode_keys = thd_keys([1] * len(self.lengths), device)
        return self._decode_keys

    def decode(self, model: Any, tokens_B1: torch.Tensor) -> torch.Tensor:
        """The hidden states [B, 1, D] of one more token [B, 1] of every sequence, by :class:`DecodeStep`."""
        self.begin_decode(tokens_B1.device)
        longest = max(self.lengths)
        if self._decode_step is None or self._decode_step.window < longest:
            window = min(-(-longest // WINDOW_MULTIPLE) * WINDOW_MULTIPLE, self.params.max_sequence_length)
            self._decode_step = DecodeStep(model, self.params.cache_manager.cache, len(self.lengths), window)
        return self._decode_step(tokens_B1[:, 0], self.lengths).unsqueeze(1)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was; both belong to one prompt, so lengths stay (beam search)."""
        if self.params.is_paged:
            raise ValueError("beam search needs InferenceParams(is_paged=False).")
        longest = max(self.lengths)
        for layer in self.params.cache_manager.cache.values():
            for tensor in layer:
                tensor[: len(beam_idx), :longest] = tensor[beam_idx.to(tensor.device), :longest]

    def _begin(self, new: list[int], num_columns: int) -> None:
        self.params.pre_step(OrderedDict(enumerate(new)))
        self.lengths = list(self.params.sequences.values())
        self.num_columns += num_columns

    def _require_room(self, length: int) -> None:
        if length > self.params.max_sequence_length:
            raise ValueError(
                f"a sequence of {length} tokens exceeds InferenceParams.max_sequence_length="
                f"{self.params.max_sequence_length}: make it prompt plus new tokens."
            )


def takes_padded_batches(forward: Callable[..., ModelOutput]) -> Callable[..., ModelOutput]:
    """Lets a decoder's ``forward`` take padded batches and a KV cache beside the batches of training.

    Batches of training go straight through. In evaluation, padding on the left is moved to the right and the hidden
    states come back in the caller's layout; so do a thd model's padded batches, in training too.

    Args:
        forward: ``forward(self, input_ids=, inputs_embeds=, attention_mask=, inference_params=, ...)`` of a model with
            ``config.attn_input_format``, returning ``last_hidden_state``.
    """

    @functools.wraps(forward)
    def padded_forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> ModelOutput:
        thd = self.config.attn_input_format == "thd"
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        name = "input_ids" if inputs_embeds is None else "inputs_embeds"
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, KVCache):
            cache = KVCache(cache)
        if cache is not None and cache.lengths:
            if tokens.shape[1] != 1:
                raise ValueError(
                    f"{tokens.shape[1]} more columns for a KV cache in use: TransformerEngine appends one token at a "
                    "time (no prefill_chunk_size, no second prompt)."
                )
            if _decodes_in_a_graph(self, tokens, cache):
                return BaseModelOutputWithPast(last_hidden_state=cache.decode(self, tokens))
            keys = cache.begin_decode(tokens.device)
            if not thd:
                return forward(self, **{name: tokens}, inference_params=cache.params, **kwargs)
            output = forward(self, **{name: tokens.transpose(0, 1)}, inference_params=cache.params, **keys, **kwargs)
            output.last_hidden_state = output.last_hidden_state.transpose(0, 1)
            return output
        packed = thd and kwargs.get("cu_seq_lens_q") is not None
        if cache is None and (packed or not _must_move(self, attention_mask, thd)):
            return forward(self, **{name: tokens}, attention_mask=attention_mask, **kwargs)
        mask_BS = (
            torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
            if attention_mask is None
            else attention_mask[:, -tokens.shape[1] :].bool()
        )
        layout = PaddedBatch(mask_BS, packed=thd)
        if cache is not None:
            cache.begin_prompt(layout.lengths, tokens.shape[1], thd, self.config.num_attention_heads)
            kwargs["inference_params"] = cache.params
        output = forward(self, **{name: layout.pack(tokens)}, **{**kwargs, **layout.batch_keys()})
        output.last_hidden_state = layout.unpack(output.last_hidden_state)
        return output

    return padded_forward


def _decodes_in_a_graph(model: Any, tokens: torch.Tensor, cache: KVCache) -> bool:
    """Whether a step of one token has nothing that a CUDA graph cannot hold."""
    plain = model.static_decoding and not (model.training or model.precision.enabled or torch.is_grad_enabled())
    return plain and tokens.is_cuda and not (tokens.is_floating_point() or cache.params.is_paged)


def _must_move(model: Any, attention_mask: torch.Tensor | None, thd: bool) -> bool:
    """Whether a batch without ``cu_seq_lens`` is not as the layers take it."""
    if thd:
        # In training a missing cu_seq_lens is a mistake, which the model reports, unless a mask says what is meant.
        return attention_mask is not None or not model.training
    if model.training or attention_mask is None:
        return False  # the collator pads on the right; looking would wait for the device in every step
    return bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any())


class CachedGenerationMixin(GenerationMixin):
    """``generate`` of transformers (greedy, sampling, beam search, ...) on the backend's KV cache.

    ``past_key_values`` (or ``cache``) takes the backend's ``InferenceParams``; without one, and unless
    ``use_cache=False``, ``generate`` makes its own. Prompts of unequal lengths are padded on the left, with an
    ``attention_mask``.
    """

    _is_stateful = True  # the cache cannot be cropped: transformers refuses assisted generation

    def generate(
        self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """As ``transformers.GenerationMixin.generate``.

        Raises:
            ValueError: an ``InferenceParams`` in use, of another backend, or without room for the prompts; prompts
                padded on the right.
        """
        mask = kwargs.get("attention_mask")
        right_padded = (
            [] if mask is None else (mask.bool().any(dim=1) & ~mask[:, -1].bool()).nonzero().flatten().tolist()
        )
        if right_padded:
            raise ValueError(
                f"attention_mask ends with padding in row {right_padded[0]}: a new token would follow it. Pad prompts "
                "on the left (tokenizer.padding_side='left')."
            )
        given = [kwargs.pop(name) for name in ("past_key_values", "cache") if kwargs.get(name) is not None]
        if given:
            expected = te_backend.resolve(self.config.te_backend).InferenceParams
            if not isinstance(given[0], (KVCache, expected)):
                raise ValueError(
                    f"past_key_values is a {type(given[0]).__module__}.{type(given[0]).__name__}; the layers of this "
                    f"model take a {expected.__module__}.{expected.__name__} (te_backend={self.config.te_backend})."
                )
            kwargs[CACHE_NAME] = given[0] if isinstance(given[0], KVCache) else KVCache(given[0])
        return super().generate(inputs, generation_config, **kwargs)

    def new_inference_params(self, max_batch_size: int, max_sequence_length: int) -> Any:
        """An empty ``InferenceParams`` of the backend for this model; ``max_sequence_length`` is rounded up."""
        config = self.config
        room = -(-max_sequence_length // CACHE_LENGTH_MULTIPLE) * CACHE_LENGTH_MULTIPLE
        return te_backend.resolve(config.te_backend).InferenceParams(
            max_batch_size=max_batch_size,
            max_sequence_length=room,
            num_heads_kv=config.num_key_value_heads,
            head_dim_k=config.head_dim,
            dtype=self.dtype,
            max_ctx_len=room,
            qkv_format=config.attn_input_format,
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: KVCache | None = None,
        cache: KVCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The columns that the cache has not seen, or all of them without a cache."""
        if kwargs.get("position_ids") is not None:
            raise ValueError("position_ids cannot be given: positions follow from attention_mask.")
        cache = past_key_values if cache is None else cache
        inputs = {"attention_mask": attention_mask, "logits_to_keep": kwargs.get("logits_to_keep", 1)}
        if cache is None:
            return {"input_ids": input_ids, **inputs}
        return {"input_ids": input_ids[:, cache.num_columns :], CACHE_NAME: cache, **inputs}

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Called by ``generate``: puts the cache into ``model_kwargs``."""
        for name in ("cache_implementation", "prefill_chunk_size"):
            if (value := getattr(generation_config, name)) is not None:
                raise ValueError(f"{name}={value!r}: the layers have their own cache, filled in one go; drop it.")
        if model_kwargs.get(CACHE_NAME) is None and generation_config.use_cache is not False:
            sequences = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            model_kwargs[CACHE_NAME] = KVCache(self.new_inference_params(sequences, max_cache_length))
