"""Continues prompts with a model, from the command line.

    python generate.py final_model --prompt ACGTTGCA --max-new-tokens 64
    python generate.py final_model --prompt ACGT --prompt GATTACA --do-sample --temperature 0.8 --top-k 4 --seed 1
    python generate.py final_model --prompt ACGT --num-beams 4 --logprobs

Prints prompt and continuation, a line per sequence. With ``--logprobs`` a JSON object per sequence instead: ``prompt``,
``text`` (the continuation), ``tokens`` and ``logprobs`` (nats, of the model itself: before temperature or top-k).
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, set_seed

from collator import BSHDCollator
from dataset import load_tokenizer
from pretrained import load_model, project_architecture
from scoring import token_log_probs
from training import to_device
from windows import WindowCutter


def encode_prompts(
    prompts: list[str], tokenizer: PreTrainedTokenizerBase, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` [B, S], padded on the left; BOS where the tokenizer has one, never EOS.

    Raises:
        ValueError: a prompt without any token.
    """
    cutter = WindowCutter(tokenizer, max_seq_length=2**31, stride=0)
    rows = [[*cutter.prefix.tolist(), *(cutter.encode(prompt).tolist() if prompt else [])] for prompt in prompts]
    if [] in rows:
        raise ValueError(f"prompt {rows.index([])} is empty, and the tokenizer has no BOS token to begin with.")
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad_token_id] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


def generate(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A record per generated sequence: prompt, text, tokens, and logprobs where asked for."""
    project_architecture(options.model)  # before the tokenizer, whose errors would only confuse
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    # bshd whatever the model was trained in: TE's packed KV cache has fewer sequences, see generation.py.
    model = load_model(
        options.model, device, dtype, te_backend=options.te_backend, attn_input_format="bshd", self_attn_mask_type=None
    )
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    inputs = {key: value.to(device) for key, value in encode_prompts(options.prompt, tokenizer, pad_token_id).items()}
    length = inputs["input_ids"].shape[1] + options.max_new_tokens
    if length > model.config.max_position_embeddings:
        raise ValueError(
            f"prompt and --max-new-tokens make {length} tokens, more than the model's max_position_embeddings="
            f"{model.config.max_position_embeddings}: shorten one of them."
        )
    if options.seed is not None:
        set_seed(options.seed)
    chosen = {
        name: getattr(options, name)
        for name in ("temperature", "top_k", "top_p", "num_beams", "num_return_sequences")
        if getattr(options, name) is not None
    }
    sequences = model.generate(
        **inputs,
        max_new_tokens=options.max_new_tokens,
        do_sample=options.do_sample,
        use_cache=not options.no_cache,
        pad_token_id=pad_token_id,
        eos_token_id=None if options.ignore_eos else tokenizer.eos_token_id,
        **chosen,
    ).cpu()
    per_prompt = len(sequences) // len(options.prompt)
    results, whole = [], []
    for index, sequence in enumerate(sequences.tolist()):
        mask = inputs["attention_mask"][index // per_prompt].tolist()
        prompt = [token for token, real in zip(sequence, mask) if real]
        new = sequence[len(mask) :]
        if not options.ignore_eos and tokenizer.eos_token_id in new:
            new = new[: new.index(tokenizer.eos_token_id) + 1]  # the rest is padding
        text = tokenizer.decode(new, skip_special_tokens=True)
        results.append({"prompt": options.prompt[index // per_prompt], "text": text, "tokens": new})
        whole.append(torch.tensor(prompt + new).numpy())
    if options.logprobs:
        for result, tokens in zip(results, whole, strict=True):
            # The sequences themselves, scored: right for every strategy, also for beams.
            batch = to_device(BSHDCollator(pad_token_id)([tokens]), device)
            log_p = token_log_probs(model, batch)[0, len(tokens) - len(result["tokens"]) - 1 : -1]
            result["logprobs"] = [round(value, 6) for value in log_p.tolist()]
    return results


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder: a run's final_model, or what convert.py hf-to-te made")
    parser.add_argument("--prompt", action="append", default=[], help="may be repeated; all run as one batch")
    parser.add_argument("--prompt-file", type=Path, help="a file with a prompt per line")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--do-sample", action="store_true", help="draw tokens instead of taking the likeliest")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--num-beams", type=int)
    parser.add_argument("--num-return-sequences", type=int)
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--ignore-eos", action="store_true", help="always generate --max-new-tokens tokens")
    parser.add_argument("--no-cache", action="store_true", help="recompute everything for every token")
    parser.add_argument(
        "--logprobs", action="store_true", help="print JSON with the log-probability of every new token"
    )
    parser.add_argument("--tokenizer", help="folder or Hub name; default: the model's folder")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: as stored")
    parser.add_argument("--te-backend", default="auto", help="auto, transformer_engine or reference")
    parser.add_argument("--device", help="default: cuda where it is, else cpu")
    options = parser.parse_args(arguments)
    if options.prompt_file is not None:
        if not options.prompt_file.is_file():
            parser.error(f"--prompt-file={options.prompt_file}: no such file.")
        try:
            options.prompt += options.prompt_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--prompt-file={options.prompt_file} is no text in UTF-8 that can be read: {error}.")
    if not options.prompt:
        parser.error("give --prompt or --prompt-file.")
    for name, least in (("max_new_tokens", 1), ("num_beams", 1), ("num_return_sequences", 1), ("top_k", 0)):
        if (value := getattr(options, name)) is not None and value < least:
            parser.error(f"--{name.replace('_', '-')}={value} must be at least {least}.")
    if options.temperature is not None and not 0 < options.temperature < math.inf:
        parser.error(f"--temperature={options.temperature} must be a number above 0.")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        parser.error(f"--top-p={options.top_p} must be above 0 and at most 1.")
    try:
        options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=options.device).cpu()  # which meta cannot
    except (RuntimeError, AssertionError) as error:  # no such device, or a torch without CUDA
        reason = str(error).partition("\n")[0]
        parser.error(f"--device={options.device} cannot be used here ({reason}): give cpu, cuda or cuda:<number>.")
    for name in ("temperature", "top_k", "top_p"):
        if getattr(options, name) is not None and not options.do_sample:
            parser.error(f"--{name.replace('_', '-')} has an effect with --do-sample only: add it, or drop this.")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        results = generate(options, options.device)
    except (ValueError, OSError) as error:
        raise SystemExit(f"generate.py: {error}") from error
    for result in results:
        line = json.dumps(result) if options.logprobs else f"{result['prompt']}{result['text']}"
        print(line)


if __name__ == "__main__":
    main()
