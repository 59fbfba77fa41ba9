"""Dropout follows from the seed and the step: equal configs give equal bits, and a resumed run too."""

from contextlib import nullcontext

import pytest
import torch

import circuitscope as cs
from circuitscope.training import trainer
from tiny_run import Crash, CrashAt, same_bits, same_run, saved, tiny

OPTIONS = {"embed_dropout": 0.25, "dropout": 0.25}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trainer.train(tiny(**OPTIONS), root=tmp_path_factory.mktemp("runs"), name="one")


def test_equal_configs_drop_the_same_entries_whatever_was_drawn_before(run, tmp_path):
    torch.rand(7)
    before = torch.random.get_rng_state()
    again = trainer.train(tiny(**OPTIONS), root=tmp_path)
    assert same_run(run.path, again.path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_crashed_run_with_dropout_resumes_to_the_same_bits(run, tmp_path):
    with pytest.raises(Crash):
        trainer.train(tiny(**OPTIONS), root=tmp_path, name="broken", progress=CrashAt(10))
    trainer.resume(cs.Run(tmp_path / "broken"))
    assert same_run(run.path, tmp_path / "broken")


@pytest.mark.parametrize("option", list(OPTIONS))
def test_each_dropout_changes_training_from_the_first_update(run, option, tmp_path):
    plain = trainer.train(tiny(), root=tmp_path, name="plain")
    dropped = trainer.train(tiny(**{option: 0.25}), root=tmp_path, name="dropped")
    assert same_bits(saved(plain.path)[0], saved(dropped.path)[0])
    assert not same_bits(saved(plain.path)[3], saved(dropped.path)[3])


def test_nothing_is_dropped_in_eval_mode_so_phi_and_evaluations_are_exact(run):
    model, tokens = run.load(), run.batch().tokens
    assert not model.training
    assert torch.equal(model(tokens), model(tokens))
    assert torch.allclose(cs.phi(model, tokens, layer=1).sum(-1), torch.tensor(1.0))


def test_the_shares_of_dropout_are_what_the_config_says_and_the_mean_stays():
    model = cs.model("attention", n_layers=1, d_model=64, embed_dropout=0.25, dropout=0.5, vocab_size=64)
    tokens = torch.arange(64).expand(64, 64)
    torch.manual_seed(0)
    streams, patterns = [], []
    model.run_with_hooks(
        tokens,
        fwd_hooks=[
            ("blocks.0.hook_resid_pre", lambda x, hook: streams.append(x)),
            ("blocks.0.mixer.hook_phi", lambda x, hook: patterns.append(x)),
        ],
    )
    lower = torch.ones(64, 64).tril().bool()
    assert (streams[0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert (patterns[0][:, 0, lower] == 0).float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert patterns[0].sum(-1).mean().item() == pytest.approx(1.0, abs=0.02)


def test_both_paths_of_attention_drop_the_same_entries():
    model = cs.model("attention", n_layers=1, d_model=16, dropout=0.5, vocab_size=64, max_length=16)
    tokens = torch.arange(16).expand(4, 16)
    torch.manual_seed(3)
    fused = model(tokens)
    torch.manual_seed(3)
    by_phi = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.mixer.hook_phi", lambda x, hook: x)])
    assert torch.allclose(fused, by_phi, atol=1e-6)


def test_a_run_without_dropout_draws_nothing_and_is_the_same_whatever_the_seed_of_dropout(tmp_path, monkeypatch):
    plain = trainer.train(tiny(), root=tmp_path, name="plain")
    monkeypatch.setattr(trainer, "seeded", lambda device, seed: nullcontext())
    before = torch.random.get_rng_state()
    assert same_run(plain.path, trainer.train(tiny(), root=tmp_path, name="as_before").path)
    assert torch.equal(torch.random.get_rng_state(), before)
