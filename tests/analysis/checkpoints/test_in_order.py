"""Several checkpoints read at once: the same table, in order; interruption, damage, threads."""

import threading
import time

import pandas as pd
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.checkpoints.in_order import in_order, readable_at_once
from circuitscope.analysis.checkpoints.runner import analyze
from circuitscope.analysis.scores import rows as scoring
from circuitscope.kernels.selective_scan import selective_scan
from circuitscope.training.trainer import train
from tiny_run import Listens, tiny


@pytest.fixture
def run(tmp_path):
    return train(tiny(), root=tmp_path, name="tiny")


@pytest.fixture
def two_at_once(monkeypatch):
    monkeypatch.setattr(scoring, "readable_at_once", lambda *_: 2)


def fresh(run):
    for path in (run.path / "analysis").glob("*.parquet"):
        path.unlink()
    return run


def test_two_at_once_make_the_table_that_one_makes(run, monkeypatch):
    told, one = Listens(), analyze(run)
    monkeypatch.setattr(scoring, "readable_at_once", lambda *_: 2)
    two = analyze(fresh(run), progress=told)
    pd.testing.assert_frame_equal(one, two, atol=1e-6, rtol=0)
    assert told.steps == run.steps == [0, 3, 6, 9, 12]


def test_more_at_once_than_there_are_checkpoints(run, monkeypatch):
    monkeypatch.setattr(scoring, "readable_at_once", lambda *_: 8)
    assert sorted(analyze(run, steps="3,9").step.unique()) == [3, 9]


@pytest.mark.usefixtures("two_at_once")
def test_an_interrupt_keeps_what_is_done(run):
    with pytest.raises(KeyboardInterrupt):
        analyze(run, progress=Listens(stop_at=6))
    again = Listens()
    analyze(run, progress=again)
    assert again.steps == [9, 12]


@pytest.mark.usefixtures("two_at_once")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_on_another_thread_comes_out_and_keeps_what_is_done(run, monkeypatch, error):
    real, third = scoring.score_rows, run.load(6).embed.weight

    def breaks(model, *args):
        if torch.equal(model.embed.weight, third):
            raise error
        return real(model, *args)

    monkeypatch.setattr(scoring, "score_rows", breaks)
    with pytest.raises(error):
        analyze(run)
    monkeypatch.setattr(scoring, "score_rows", real)
    again = Listens()
    analyze(run, progress=again)
    assert again.steps == [6, 9, 12]


@pytest.mark.usefixtures("two_at_once")
def test_a_damaged_checkpoint_is_left_out_by_name(run):
    (run.path / "checkpoints" / "step-00000006.safetensors").write_bytes(b"")
    told = Listens()
    assert sorted(analyze(run, progress=told).step.unique()) == [0, 3, 9, 12]
    assert told.steps == [0, 3, 9, 12]
    assert [line for line in told.lines if "checkpoint 6 left out" in line and "step-00000006" in line]


def test_results_come_in_order_though_the_first_takes_longest():
    def work(item):
        time.sleep(0.2 if item == 0 else 0)
        return item, threading.get_ident()

    done = list(in_order(work, range(6), at_once=2))
    assert [item for item, _ in done] == list(range(6))
    assert len({thread for _, thread in done}) == 2


def test_no_more_is_begun_than_is_needed_to_keep_all_busy():
    asked = []
    results = in_order(lambda item: item, (asked.append(i) or i for i in range(100)), at_once=2)
    for taken in range(1, 11):
        next(results)
        assert len(asked) <= taken + 3
    results.close()
    assert len(asked) <= 13


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(("threads", "each"), [(2, 1), (1, 1), (5, 2)])
def test_workers_share_torchs_threads_and_the_caller_gets_them_back(threads, each, closed):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = in_order(lambda _: torch.get_num_threads(), range(4), at_once=2)
        assert next(results) == each
        assert closed or list(results) == [each] * 3
        results.close()
        assert torch.get_num_threads() == threads
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [threads]
    finally:
        torch.set_num_threads(before)


def test_one_checkpoint_gets_all_threads(run, monkeypatch):
    seen, real = [], scoring.score_rows

    def counts(*args):
        seen.append(threading.current_thread() is threading.main_thread())
        return real(*args)

    monkeypatch.setattr(scoring, "readable_at_once", lambda *_: 2)
    monkeypatch.setattr(scoring, "score_rows", counts)
    analyze(run, steps=3)
    assert seen == [True]


@pytest.mark.parametrize("name", ["attention", "mamba"])
def test_a_model_is_read_once_per_thread_up_to_a_few_and_as_memory_allows(monkeypatch, name):
    config = cs.model(name, vocab_size=64).config
    for threads, several in ((1, 1), (4, 4), (64, 8)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert readable_at_once(config, tokens=64) == several
    assert readable_at_once(config, tokens=10**12) == 1


def test_two_checkpoints_of_kernels_at_once_make_the_table_that_one_makes(tmp_path, monkeypatch):
    run = train(tiny(mixers="mamba"), root=tmp_path, name="kernels")
    one = analyze(run)
    monkeypatch.setattr(scoring, "readable_at_once", lambda *_: 2)
    pd.testing.assert_frame_equal(one, analyze(fresh(run)), atol=1e-6, rtol=0)


def test_a_kernel_lets_other_threads_run():
    """While a kernel computes, another thread counts; it would stand still if the kernel held Python's lock."""
    dt, A, B = torch.rand(256, 128, 128), -torch.rand(128, 16), torch.randn(256, 128, 16)
    selective_scan(dt[:1], dt[:1], A, B[:1], B[:1])  # compiled before the other thread starts
    counted, done = [], threading.Event()

    def count():
        while not done.is_set():
            counted.append(1)
            time.sleep(1e-4)

    other = threading.Thread(target=count)
    other.start()
    try:
        before = len(counted)
        selective_scan(dt, dt, A, B, B)
        during = len(counted) - before
    finally:
        done.set()
        other.join()
    assert during > 5
