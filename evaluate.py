"""Loss and perplexity of a model on Parquet, FASTA or a Hugging Face data set, and the score of every record.

    python evaluate.py final_model data/klebsiella_1084_500k --max-seq-length 512
    torchrun --nproc_per_node=8 evaluate.py final_model variants.fasta --scores scores.parquet
    python evaluate.py final_model --lm-eval-tasks lambada_openai                  # needs pip install lm-eval

Prints one JSON object. With the run's tokenizer, ``--max-seq-length`` and label masks, ``loss`` is the run's
``validation_loss``; batch sizes and ranks do not matter. Every rank holds the whole model and scores its share.

``--scores`` writes a Parquet table with a row per record, in the order of the data: ``record`` (0, 1, ...), ``name``
(FASTA's, or ``--id-column``), ``num_targets``, ``log_likelihood`` (nats, the sum over the targets; null if there is
none). The effect of a variant is the difference of two such sums. Records longer than a window are scored window by
window; ``--stride`` gives later windows context.
"""

import argparse
import functools
import importlib.util
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from collator import BSHDCollator, THDCollator, build_label_table
from dataset import load_tokenizer
from distributed import init_distributed, leave_group, shut_down
from paths import PROJECT_DIR, project_path
from pretrained import load_model, project_architecture
from records import find_files, find_parquet_files, is_fasta, open_records
from scoring import Scores, score_texts
from windows import WindowCutter


class Source:
    """The records of a data set, in its own order.

    Attributes:
        texts: a new iterator over them at each call.
        names: a name per record, or None.
    """

    def __init__(self, texts: Callable[[], Iterator[str | None]], names: Callable[[], Iterable[str]] | None):
        self.texts = texts
        self.names = names


def read_fasta(path: Path) -> Iterator[tuple[str, str]]:
    """(name, sequence) of every record, as data/fasta_to_parquet.py reads them."""
    spec = importlib.util.spec_from_file_location("fasta_to_parquet", PROJECT_DIR / "data" / "fasta_to_parquet.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.read_fasta(path)


def open_source(options: argparse.Namespace) -> Source:
    """FASTA by its suffix, compressed or not; otherwise Parquet or ``datasets``.

    Raises:
        ValueError: it cannot be read, or has no such column.
    """
    if is_fasta(Path(options.data)):
        path = Path(project_path(options.data))
        if options.id_column:
            raise ValueError(f"--id-column={options.id_column}: FASTA records have names of their own; drop it.")
        return Source(
            lambda: (sequence for _, sequence in read_fasta(path)), lambda: (name for name, _ in read_fasta(path))
        )
    files = find_parquet_files(os.path.expanduser(options.data))
    kwargs = {"path": options.data} | ({} if files else {"split": options.split})
    records = open_records(kwargs, options.text_column)
    names = None
    if options.id_column:
        if not files:
            raise ValueError(f"--id-column={options.id_column} needs Parquet files, and {options.data!r} is none.")
        for file in files:
            if options.id_column not in (columns := pq.read_schema(file).names):
                raise ValueError(f"{file}: --id-column={options.id_column!r} is not among {', '.join(columns)}.")
        names = functools.partial(_read_column, files, options.id_column)
    return Source(lambda: (text for array in records.scan(0) for text in array.to_pylist()), names)


def _read_column(files: list[Path], column: str) -> Iterator[str]:
    return (str(value) for file in files for value in pq.read_table(file, columns=[column])[0].to_pylist())


def evaluate(options: argparse.Namespace, device: torch.device) -> tuple[Scores, Source, int]:
    """Scores the data set; every rank calls it. Returns the scores, the source, and the characters of its texts."""
    project_architecture(options.model)  # before the tokenizer, whose errors would only confuse
    source = open_source(options)
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    cutter = WindowCutter(tokenizer, options.max_seq_length, options.stride)
    label_table = build_label_table(tokenizer, options.uppercase_labels, options.mask_degenerate_bases)
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    if options.no_packing:
        collate: BSHDCollator | THDCollator = BSHDCollator(pad_token_id, label_table=label_table)
    else:
        budget = max(options.batch_tokens, options.max_seq_length)
        collate = THDCollator(pad_token_id, budget, options.max_seq_length, label_table=label_table)
    model = load_model(
        options.model,
        device,
        options.dtype if options.dtype == "auto" else getattr(torch, options.dtype),
        te_backend=options.te_backend,
        attn_input_format="bshd" if options.no_packing else "thd",
        self_attn_mask_type=None,
    )
    if model.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} ids and the model {model.config.vocab_size}: name the model's own "
            "with --tokenizer."
        )
    if options.max_seq_length > model.config.max_position_embeddings:
        raise ValueError(
            f"--max-seq-length={options.max_seq_length} exceeds the model's max_position_embeddings="
            f"{model.config.max_position_embeddings}: shorten the windows."
        )
    characters = 0

    def counted() -> Iterator[str | None]:
        nonlocal characters
        for text in source.texts():
            characters += len(text or "")
            yield text

    rows = max(1, options.batch_tokens // options.max_seq_length)
    return score_texts(model, counted(), cutter, collate, rows, device), source, characters


def summary(scores: Scores, characters: int) -> dict[str, Any]:
    """The metrics of a data set."""
    nats = float(-scores.log_likelihood.sum())
    return {
        "loss": scores.loss,
        "perplexity": math.exp(min(scores.loss, 700.0)),
        "bits_per_token": scores.loss / math.log(2),
        "bits_per_base": nats / math.log(2) / characters,
        "num_targets": int(scores.num_targets.sum()),
        "num_bases": characters,
        "num_records": len(scores.num_targets),
        "num_records_without_target": int((scores.num_targets == 0).sum()),
    }


def write_scores(path: Path, scores: Scores, names: Iterable[str] | None) -> None:
    """The table of ``--scores``; it appears once complete."""
    columns: dict[str, Any] = {"record": pa.array(range(len(scores.num_targets)), pa.int64())}
    if names is not None:
        columns["name"] = pa.array(list(names), pa.string())
    columns["num_targets"] = pa.array(scores.num_targets)
    columns["log_likelihood"] = pa.array(scores.log_likelihood, mask=scores.num_targets == 0)
    unfinished = path.with_name(f"{path.name}.unfinished")
    pq.write_table(pa.table(columns), unfinished)
    unfinished.replace(path)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as it can be without reading anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder: a run's final_model, or what convert.py hf-to-te made")
    parser.add_argument(
        "data", nargs="?", help="a Parquet file, folder or glob pattern; FASTA; a Hugging Face data set"
    )
    parser.add_argument("--tokenizer", help="folder or Hub name; default: the model's folder")
    parser.add_argument("--max-seq-length", type=int, default=512, help="tokens per window (default: %(default)s)")
    parser.add_argument("--stride", type=int, default=0, help="tokens of context from the window before")
    parser.add_argument("--text-column", default="sequence", help="column of the texts (default: %(default)s)")
    parser.add_argument("--id-column", help="Parquet column that becomes the scores' name column")
    parser.add_argument("--split", default="train", help="of a Hugging Face data set (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="tokens per batch and rank")
    parser.add_argument("--no-packing", action="store_true", help="padded rows instead of packed sequences")
    parser.add_argument("--uppercase-labels", action="store_true", help="as dataset.uppercase_labels")
    parser.add_argument("--mask-degenerate-bases", action="store_true", help="as dataset.mask_degenerate_bases")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: as stored")
    parser.add_argument("--te-backend", default="auto", help="auto, transformer_engine or reference")
    parser.add_argument("--scores", type=Path, help="Parquet file to write, a row per record")
    parser.add_argument("--lm-eval-tasks", help="comma-separated tasks of EleutherAI's harness, instead of data")
    parser.add_argument("--lm-eval-limit", type=int, help="at most this many examples per task")
    options = parser.parse_args(arguments)
    if (options.data is None) == (options.lm_eval_tasks is None):
        parser.error("give either data or --lm-eval-tasks.")
    if options.stride < 0:
        parser.error(f"--stride={options.stride} must be at least 0.")
    for name in ("max_seq_length", "batch_tokens"):
        if getattr(options, name) < 2:
            parser.error(f"--{name.replace('_', '-')}={getattr(options, name)} must be at least 2.")
    if options.lm_eval_limit is not None and (options.lm_eval_limit < 1 or options.lm_eval_tasks is None):
        parser.error(f"--lm-eval-limit={options.lm_eval_limit} must be at least 1, and needs --lm-eval-tasks.")
    if options.lm_eval_tasks is not None:
        for name in ("scores", "id_column"):
            if (given := getattr(options, name)) is not None:
                parser.error(f"--{name.replace('_', '-')}={given} has no effect with --lm-eval-tasks: drop it.")
    if options.scores is not None:
        folder = options.scores.absolute().parent
        if not folder.is_dir():
            parser.error(f"--scores={options.scores}: its folder does not exist.")
        try:  # before hours of scoring
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            parser.error(f"--scores={options.scores}: its folder cannot be written to ({error.strerror}).")
        read = {file.resolve() for file in find_files(options.data, lambda file: True) or ()}
        if options.scores.is_dir() or options.scores.resolve() in read:
            parser.error(f"--scores={options.scores} is a folder, or the data itself: name a file to make.")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    ctx = init_distributed()
    try:
        if options.lm_eval_tasks is not None:
            from lm_eval_adapter import run_lm_eval

            result = run_lm_eval(options, ctx.device)
        else:
            scores, source, characters = evaluate(options, ctx.device)
            result = summary(scores, characters)
            if not math.isfinite(result["loss"]):
                raise ValueError(
                    f"the loss of {options.model} is {result['loss']}: its weights are no trained model's."
                )
            if ctx.is_main and options.scores is not None:
                write_scores(options.scores, scores, source.names() if source.names else None)
    except (ValueError, OSError) as error:
        dist.destroy_process_group()
        raise SystemExit(f"evaluate.py: {error}") from error
    if ctx.is_main:
        print(json.dumps(result))
    leave_group()


if __name__ == "__main__":
    main()
    shut_down()
