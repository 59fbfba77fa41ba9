"""A process that is forked after kernels have run computes the same numbers, on one thread, and does not hang."""

import multiprocessing
import queue

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import circuitscope as cs
from circuitscope.kernels import forks

SECONDS = 60  # before a child counts as hung; it may have to compile kernels, on a busy machine
FAMILIES = ("mamba", "rwkv", "hyena", "attention")  # scan and taps; WKV; long convolution; torch alone


def numbers(preset: str) -> list[float]:
    """The loss of a model and what its gradients add up to."""
    model = cs.model(preset, d_model=64, n_layers=1, vocab_size=64, max_length=32)
    tokens = torch.randint(64, (64, 32), generator=torch.Generator().manual_seed(1))
    loss = model(tokens).logsumexp(-1).square().mean()
    loss.backward()
    return [loss.item(), *(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class OneModel(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([torch.get_num_threads(), *numbers("mamba")], dtype=torch.float64)


def child(preset: str, results: "multiprocessing.Queue[tuple[int, list[float]]]") -> None:
    results.put((torch.get_num_threads(), numbers(preset)))


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_forked_child_gets_the_numbers_of_its_parent_on_one_thread(two_threads, preset):
    expected = numbers(preset)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=child, args=("mamba" if preset == "attention" else preset, results))
    process.start()
    try:
        threads, found = results.get(timeout=SECONDS)
    except queue.Empty:
        pytest.fail(f"the child gave nothing; its exit code: {process.exitcode}")
    finally:
        process.kill()
        process.join()
    assert threads == 1
    assert found == pytest.approx(numbers("mamba") if preset == "attention" else expected, rel=1e-4)
    assert torch.get_num_threads() == 2


def test_a_worker_of_a_data_loader_gets_them_too(two_threads):
    expected = numbers("mamba")
    loader = DataLoader(OneModel(), num_workers=1, timeout=SECONDS, multiprocessing_context="fork")
    ((threads, *found),) = next(iter(loader)).tolist()
    assert threads == 1
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_child_says_once_that_it_lost_threads_and_not_if_there_was_only_one(monkeypatch, caplog):
    for threads, lines in ((2, 1), (1, 0)):
        monkeypatch.setattr(forks, "_computed", True)
        monkeypatch.setattr(forks, "_forked", False)
        monkeypatch.setattr(forks, "_line", "")
        torch.set_num_threads(threads)
        forks._in_child()
        assert torch.get_num_threads() == 1
        caplog.clear()
        assert forks.threads_left_behind()
        assert forks.threads_left_behind()
        assert len(caplog.messages) == lines
        assert all("forked" in line and "spawn" in line for line in caplog.messages)


def test_a_process_that_has_computed_nothing_leaves_its_children_as_they_are(monkeypatch, two_threads):
    monkeypatch.setattr(forks, "_computed", False)
    monkeypatch.setattr(forks, "_forked", False)
    forks._in_child()
    assert not forks.threads_left_behind()
    assert torch.get_num_threads() == 2
