"""te_backend.py: the choice of layers, and what it says about it."""

import logging

import pytest
import torch

import te_backend
import te_reference


@pytest.fixture(autouse=True)
def fresh_choice():
    te_backend.resolve.cache_clear()
    yield
    te_backend.resolve.cache_clear()


def test_reference_on_request(caplog):
    caplog.set_level(logging.INFO)
    assert te_backend.resolve("reference") is te_reference
    assert te_backend.resolve("reference") is te_reference
    assert [record.getMessage() for record in caplog.records] == [
        "TE backend: te_reference (plain PyTorch): te_backend=reference"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens where there is no CUDA device")
def test_auto_without_cuda_says_why(caplog):
    caplog.set_level(logging.INFO)
    assert te_backend.resolve("auto") is te_reference
    assert "no CUDA device" in caplog.text
    with pytest.raises(ValueError, match="cannot run here: no CUDA device"):
        te_backend.resolve("transformer_engine")


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="te_backend='tpu'"):
        te_backend.resolve("tpu")


def test_layer_device_follows_torchs_context():
    with torch.device("meta"):
        assert te_backend.layer_device() == "meta"
    assert te_backend.layer_device() == str(torch.get_default_device())
