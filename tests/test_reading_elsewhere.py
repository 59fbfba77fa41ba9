"""Commands that read runs do so on the device that `--device` names, and keep what the CPU would have found.

The device is the stand-in of `second_device.py`, which has no float64 and refuses to meet a tensor of the CPU.
"""

import json
import shutil
import sys

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import circuitscope as cs
from circuitscope import devices
from circuitscope.analysis.checkpoints.runner import analysis_results
from circuitscope.analysis.registry import ANALYSES, refusal
from circuitscope.cli import main as program
from circuitscope.errors import UserError
from circuitscope.training.trainer import train
from circuitscope.viz.phi_figure import phi_figure
from second_device import DEVICE, OnSecond, second_device
from tiny_run import TINY, Listens, tiny

VECTORS = {name: value for name, value in TINY.items() if name not in ("length", "pairs", "vocab_size")}
CONFIGS = {
    "attention": lambda: tiny(),
    "mamba": lambda: tiny(mixers="mamba"),
    "gated_deltanet": lambda: tiny(mixers="gated_deltanet"),
    "lstm": lambda: tiny(mixers="lstm"),
    "vectors": lambda: cs.RunConfig.build("mamba", "linear_regression", **VECTORS, dims=3, points=6),
    "vector pairs": lambda: cs.RunConfig.build("attention", "vector_mqar", **VECTORS, dims=4, pairs=3, queries=2),
}


@pytest.fixture(scope="module", params=CONFIGS)
def here(request, tmp_path_factory):
    """A run of one kind."""
    return train(CONFIGS[request.param](), root=tmp_path_factory.mktemp("runs"), name="tiny")


@pytest.fixture
def elsewhere(here, tmp_path, monkeypatch):
    """A copy of the run without its tables."""
    shutil.copytree(here.path, tmp_path / "runs" / "tiny", ignore=shutil.ignore_patterns("analysis"))
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", {*devices.WITHOUT_FLOAT64, "second"})
    return cs.Run(tmp_path / "runs" / "tiny")


def agree(ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    """Tables with the same rows, whose numbers differ by rounding."""
    assert list(ours.columns) == list(theirs.columns)
    assert len(ours) == len(theirs)
    for name in ours:
        if pd.api.types.is_float_dtype(ours[name]):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=5e-3, atol=5e-4, err_msg=name)
        else:
            assert ours[name].equals(theirs[name]), name


def test_every_analysis_that_a_run_can_have(here, elsewhere):
    names = [name for name in ANALYSES if not refusal(name, here) and name != "causal"]
    options = {"steps": "0,12", "sequences": 4}
    with second_device(float64=False), devices.reading_on(DEVICE):
        assert isinstance(next(elsewhere.load().parameters()), OnSecond)
        ours = analysis_results(elsewhere, names, **options)
    theirs = analysis_results(here, names, **options)
    for name in names:
        agree(ours[name], theirs[name])


def test_evaluation_pictures_and_the_report(here, elsewhere, tmp_path):
    with second_device(float64=False), devices.reading_on(DEVICE):
        measured = cs.evaluate(elsewhere, sequences=8)
        if here.config.model.mixers[0].name != "lstm":  # which has no Φ
            phi_figure(elsewhere, 0, steps="0,12")
        page = cs.report(elsewhere, steps="0,12", sequences=4, examples=2).save(tmp_path / "there.html")
    agree(measured, cs.evaluate(here, sequences=8))
    assert page.stat().st_size > 10_000


@pytest.mark.parametrize("here", ["attention", "mamba"], indirect=True)
def test_probes_also_with_what_the_model_loses(here, elsewhere):
    options = {"steps": "12", "sequences": 24, "causal": True}
    with second_device(float64=False), devices.reading_on(DEVICE):
        ours = cs.probe(elsewhere, "own-token", **options)
    theirs = cs.probe(here, "own-token", **options)
    assert len(ours) == len(theirs) > 0
    same = ["hook", "role", "n_train", "n_test", "majority", "chance"]
    assert ours[same].equals(theirs[same])
    # a probe's answers are counted, and rounding may turn one of them
    assert np.allclose(ours.accuracy, theirs.accuracy, atol=0.1, equal_nan=True)


# -- what is kept, and what is said ---------------------------------------------------------------------


@pytest.mark.parametrize("here", ["attention"], indirect=True)
def test_a_table_records_where_its_rows_were_computed_and_a_later_reader_is_told(here, elsewhere):
    path = elsewhere.path / "analysis" / "scores-4.parquet"

    def devices_on_disk():
        return json.loads(pq.read_schema(path).metadata[b"circuitscope"]).get("devices", {})

    cs.analyze(elsewhere, steps="0", sequences=4)
    assert devices_on_disk() == {}
    there = Listens()
    with second_device(float64=False), devices.reading_on(DEVICE):
        cs.analyze(elsewhere, steps="0,3", sequences=4, progress=there)
    assert devices_on_disk() == {"3": "second"}
    assert "scores: 1 of 2 checkpoints were analyzed before, on another device (cpu), which differs by rounding" in (
        there.lines
    )
    again = Listens()
    cs.analyze(elsewhere, steps="0,3,6", sequences=4, progress=again)
    assert devices_on_disk() == {"3": "second"}
    assert "scores: 2 of 3 checkpoints were analyzed before, on another device (second), which differs by rounding" in (
        again.lines
    )


COMMANDS = (
    ["analyze", "--steps", "12", "--sequences", "4"],
    ["evaluate", "--sequences", "4"],
    ["probe", "--probe", "own-token", "--steps", "12", "--sequences", "24"],
    ["phi"],
    ["report", "--steps", "12", "--sequences", "4"],
)


@pytest.fixture
def circuitscope(elsewhere, monkeypatch, capsys):
    """Runs the program in this process, beside the run."""
    monkeypatch.chdir(elsewhere.path.parent.parent)
    monkeypatch.delenv("CIRCUITSCOPE_RUNS", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["circuitscope", *arguments])
        with pytest.raises(SystemExit) as stop:
            program.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return run


@pytest.mark.parametrize("here", ["attention"], indirect=True)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_every_command_that_reads_a_run_takes_a_device(circuitscope, elsewhere, command, monkeypatch):
    loaded = []
    load = cs.Run.load_into
    monkeypatch.setattr(cs.Run, "load_into", lambda run, model, step: (load(run, model, step), loaded.append(model)))
    assert circuitscope(*command)[0] == 0
    on_cpu, loaded[:] = list(loaded), []
    shutil.rmtree(elsewhere.path / "analysis", ignore_errors=True)
    monkeypatch.setattr(devices, "choose_device", lambda name, order=(): {"there": DEVICE}[name])
    with second_device(float64=False):
        code, out, err = circuitscope(*command, "--device", "there")
    assert code == 0, err
    assert out
    for models, there in ((on_cpu, "cpu"), (loaded, "second")):
        assert models
        assert {weight.device.type for model in models for weight in model.parameters()} == {there}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("here", ["attention"], indirect=True)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_device_that_is_not_there_is_refused_in_one_line(circuitscope, elsewhere, command):
    assert circuitscope(*command, "--device", "cuda") == (
        2,
        "",
        "circuitscope: device 'cuda' is not available; this machine has: cpu\n",
    )
    code, _, err = circuitscope(*command, "--device", "gpu")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("circuitscope: unknown device 'gpu'")


def test_reading_ends_on_the_cpu_again_and_cudnn_is_as_it_was():
    cudnn = torch.backends.cudnn
    before = cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision
    with devices.reading_on("auto") as chosen:
        assert chosen.type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert (cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision) == ("ieee", "ieee")
    assert (cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision) == before
    with pytest.raises(UserError, match="unknown device"), devices.reading_on("gpu"):
        pass
    assert devices.reading_device().type == "cpu"
