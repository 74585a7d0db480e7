"""`trainer.accelerator=auto`: a CUDA GPU if there is one, and a line that says so."""

from __future__ import annotations

import logging

import pytest
import torch
from support.runs.composing import composed

from ragen_pl.assembly.build import build_bundle, choose_accelerator
from ragen_pl.run.reports import report_accelerator


@pytest.fixture(params=[False, True], ids=["no GPU", "GPU"])
def has_gpu(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU's name")
    # never chosen
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    return request.param


def test_auto_is_cuda_if_there_is_a_gpu_else_cpu(has_gpu):
    assert choose_accelerator("auto") == ("cuda" if has_gpu else "cpu")
    assert choose_accelerator("cpu") == "cpu" and choose_accelerator("gpu") == "gpu"


def test_the_choice_is_logged_with_its_reason(has_gpu, caplog):
    with caplog.at_level(logging.INFO, logger="ragen_pl"):
        report_accelerator("cpu")
        assert caplog.messages == []
        report_accelerator("auto")
    (line,) = caplog.messages
    expected = (
        "cuda, since torch finds a GPU (a GPU's name)" if has_gpu else "cpu, since torch finds no"
    )
    assert f"accelerator: {expected}" in line


def test_a_model_is_built_where_attention_is_not_by_cudnn():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        build_bundle(composed("env=bandit", "model=small_lm"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
