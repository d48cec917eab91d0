"""Batches against values worked by hand. Pitfalls: 5 (documents), 7 and 10 (padding), 8 (empty documents)."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from collator import BSHDCollator, THDCollator, build_label_table, round_up
from paths import project_path


@pytest.fixture(scope="module")
def nucleotides():
    return AutoTokenizer.from_pretrained(project_path("tokenizers/nucleotide_fast_tokenizer"))


def windows(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row) for row in rows]


def test_bshd_pads_on_the_right_and_shifts_within_rows():
    batch = BSHDCollator(pad_token_id=9)(windows([2, 5, 6, 3], [2, 7]))
    assert batch["input_ids"].tolist() == [[2, 5, 6, 3], [2, 7, 9, 9]]
    assert batch["labels"].tolist() == [[2, 5, 6, 3], [2, 7, -100, -100]]
    assert batch["shift_labels"].tolist() == [[5, 6, 3, -100], [7, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_bshd_pads_a_17_token_batch_to_a_multiple():
    batch = BSHDCollator(pad_token_id=0, pad_to_multiple=16)(windows(list(range(1, 18))))
    assert batch["input_ids"].shape == (1, 32)
    assert batch["attention_mask"].sum() == 17
    assert (batch["shift_labels"][0, 16:] == -100).all()


def test_thd_full_batch():
    batch = THDCollator(pad_token_id=9, num_tokens=6, max_seq_length=4)(windows([2, 5, 6, 3], [7, 8]))
    assert batch["input_ids"].tolist() == [[2, 5, 6, 3, 7, 8]]
    assert batch["labels"].tolist() == [[2, 5, 6, 3, 7, 8]]
    assert batch["shift_labels"].tolist() == [[5, 6, 3, -100, 8, -100]]
    assert batch["attention_mask"].tolist() == [[1] * 6]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 4, 6]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 4 and type(batch["max_length_q"]) is int
    assert "pad_between_seqs" not in batch and "cu_seq_lens_q_padded" not in batch


def test_thd_tail_padding_is_covered_by_documents_without_targets():
    batch = THDCollator(pad_token_id=9, num_tokens=14, max_seq_length=4, pad_to_multiple=8)(windows([2, 5, 3], [2, 3]))
    assert batch["input_ids"].shape == (1, 16)
    # 11 tokens of padding, cut at the longest window so that max_length holds for them too.
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9, 13, 16]
    assert batch["cu_seq_lens_q"].diff().max() <= batch["max_length_q"]
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 11]
    assert batch["labels"].tolist() == [[2, 5, 3, 2, 3] + [-100] * 11]
    assert batch["shift_labels"].tolist() == [[5, 3, -100, 3, -100] + [-100] * 11]


def test_thd_pads_every_sequence():
    collate = THDCollator(pad_token_id=9, num_tokens=18, max_seq_length=7, sequence_pad_multiple=4)
    assert collate.room == 16 and collate.num_tokens == 20 and collate.max_length == 8
    batch = collate(windows([2, 5, 3], [2, 6, 6, 6, 3], [4]))
    assert batch["input_ids"].tolist() == [[2, 5, 3, 9] + [2, 6, 6, 6, 3, 9, 9, 9] + [4, 9, 9, 9] + [9] * 4]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 8, 9, 13]
    assert batch["cu_seq_lens_q_padded"].tolist() == batch["cu_seq_lens_k_padded"].tolist() == [0, 4, 12, 16, 20]
    assert batch["pad_between_seqs"] is True
    ignored = -100
    assert batch["shift_labels"].tolist() == [
        [5, 3, ignored, ignored] + [6, 6, 6, 3] + [ignored] * 4 + [ignored] * 4 + [ignored] * 4
    ]
    assert batch["attention_mask"].sum() == 9


def test_thd_without_room_for_a_sequence():
    with pytest.raises(ValueError, match="token_micro_batch_size=3 holds no sequence padded to a multiple of 4"):
        THDCollator(pad_token_id=0, num_tokens=3, max_seq_length=8, sequence_pad_multiple=4)


@pytest.mark.parametrize("value, multiple, expected", [(0, 8, 0), (1, 8, 8), (8, 8, 8), (17, 16, 32), (5, 1, 5)])
def test_round_up(value, multiple, expected):
    assert round_up(value, multiple) == expected


@pytest.mark.parametrize(
    "uppercase, mask, expected",
    [
        (True, False, "ACGTN@#R"),
        (False, True, "AcgT    "),
        (True, True, "ACGT    "),
    ],
)
def test_label_masks(nucleotides, uppercase, mask, expected):
    table = build_label_table(nucleotides, uppercase, mask)
    tokens = np.frombuffer(b"AcgTN@#R", dtype=np.uint8)
    labels = [-100 if character == " " else ord(character) for character in expected]
    for collate in (BSHDCollator(0, label_table=table), THDCollator(0, 8, 8, label_table=table)):
        batch = collate([tokens])
        assert batch["input_ids"].tolist() == [list(b"AcgTN@#R")], "inputs keep their case and their control characters"
        assert batch["labels"].tolist() == [labels]
        assert batch["shift_labels"].tolist() == [labels[1:] + [-100]], "masked as a target, at that position only"


def test_label_masks_ignore_special_tokens(nucleotides):
    table = build_label_table(nucleotides, False, True)
    assert (table[[nucleotides.bos_token_id, nucleotides.eos_token_id, nucleotides.pad_token_id]] == -100).all()
    assert int((table != -100).sum()) == 8


def test_no_label_masks(nucleotides):
    assert build_label_table(nucleotides, False, False) is None


def test_label_masks_need_one_token_per_base():
    characters = "ACGTacgtNn@#"
    vocabulary = {character: n for n, character in enumerate(characters)} | {"AC": 12}
    merging = Tokenizer(models.BPE(vocab=vocabulary, merges=[("A", "C")]))
    merging.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging)
    with pytest.raises(ValueError, match="one token per base"):
        build_label_table(tokenizer, True, False)
