"""Training is exactly repeatable, agrees with a plain loop, and stops when it should."""

import json
import shutil
import time

import pytest
import torch
import torch.nn.functional as F

from circuitscope.config import RunConfig
from circuitscope.config.rate import learning_rate
from circuitscope.errors import RunFailed
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.runs import checkpoints
from circuitscope.runs.metrics import read_metrics
from circuitscope.runs.run import Run
from circuitscope.training.trainer import Diverged, resume, train
from tiny_run import Listens, rows, same_bits, same_run, saved, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tiny(), root=tmp_path_factory.mktemp("runs"))


def test_equal_configs_give_equal_bits_at_every_checkpoint(run, tmp_path):
    again = train(tiny(), root=tmp_path)
    assert same_run(run.path, again.path)
    assert rows(run.path) == rows(again.path)


def test_the_saved_config_repeats_the_run(run, tmp_path):
    again = train(RunConfig.load(run.path / "config.yaml"), root=tmp_path)
    assert same_run(run.path, again.path)
    assert (again.path / "config.yaml").read_bytes() == (run.path / "config.yaml").read_bytes()


def test_gradients_that_the_caller_has_turned_off_do_not_matter(run, tmp_path):
    with torch.no_grad():
        assert same_run(run.path, train(tiny(), root=tmp_path).path)
        assert not torch.is_grad_enabled()


def test_inference_mode_and_another_default_dtype_do_not_matter_and_are_as_before(run, tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            made = train(tiny(), root=tmp_path)
            assert torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()
            assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_run(run.path, made.path)


def test_random_numbers_drawn_before_do_not_matter(run, tmp_path):
    torch.manual_seed(123)
    torch.rand(7)
    assert same_run(run.path, train(tiny(), root=tmp_path).path)


def test_another_seed_gives_other_weights_and_other_examples(run, tmp_path):
    other = train(tiny(seed=1), root=tmp_path, name="seed")
    assert not same_bits(saved(run.path)[0], saved(other.path)[0])
    same_start = train(tiny(data_seed=1), root=tmp_path, name="data")
    assert same_bits(saved(run.path)[0], saved(same_start.path)[0])
    assert not same_bits(saved(run.path)[3], saved(same_start.path)[3])


def test_saving_more_often_changes_no_bit(run, tmp_path):
    dense = train(tiny(save_every=1, resume_every=1, log_every=1, keep_resume=2), root=tmp_path)
    ours, theirs = saved(run.path), saved(dense.path)
    assert sorted(theirs) == list(range(13))
    assert all(same_bits(ours[step], theirs[step]) for step in ours)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_losses_agree_with_a_plain_loop(tmp_path, schedule):
    """Logits at every position, cross-entropy with ignored labels, unfused AdamW: 20 steps."""
    config = tiny(steps=20, log_every=1, lr=0.01, schedule=schedule, clip=0.5)
    cfg = config.train
    model = HookedLM(config.model, seed=cfg.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(cfg.beta1, cfg.beta2),
        fused=False,
        foreach=False,
    )
    expected = []
    for step in range(20):
        batch = config.task.batch(step, size=cfg.batch_size, seed=cfg.seed)
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg)
        optimizer.step()
        expected.append(loss.item())

    run = train(config, root=tmp_path)
    got = [r["loss"] for r in read_metrics(run.path) if r["split"] == "train"]
    assert got == pytest.approx(expected, rel=1e-4)
    assert min(got) < 0.97 * got[0]  # it learned something, so the comparison says something
    final = saved(run.path)[20]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(final[name], weight, rtol=1e-3, atol=1e-4)


def test_evaluation_is_cross_entropy_and_accuracy_on_held_out_batches(run):
    row = [r for r in read_metrics(run.path) if r["split"] == "validation"][-1]
    model = run.load(12)
    losses, accuracies = [], []
    for i in range(2):
        batch = run.config.task.batch(i, split="validation", size=8, seed=0)
        where, target = batch.labelled()
        with torch.no_grad():
            logits = model(batch.tokens).flatten(0, 1)[where]
        losses.append(F.cross_entropy(logits, target).item())
        accuracies.append((logits.argmax(-1) == target).float().mean().item())
    assert row["loss_per_batch"] == pytest.approx(losses, rel=1e-4)
    assert row["accuracy_per_batch"] == pytest.approx(accuracies)


def test_initial_and_final_weights_are_always_saved(run):
    assert run.steps == [0, 3, 6, 9, 12]
    assert same_bits(saved(run.path)[0], dict(HookedLM(run.config.model, seed=0).state_dict()))


def test_the_log_schedule_saves_powers_of_two_first(tmp_path):
    run = train(tiny(save_schedule="log", save_every=10), root=tmp_path)
    assert run.steps == [0, 1, 2, 4, 8, 10, 12]


def test_resume_points_stay_within_their_number(tmp_path):
    run = train(tiny(resume_every=1, keep_resume=3), root=tmp_path)
    steps = run.checkpoints.resume_steps()
    assert len(steps) == 3
    assert steps[-1] == 12
    assert min(steps) <= 8  # spread over the run, not the last three


# Accuracy passes 4.5% for the first time well after the first evaluation.
EASY = {"early_stop": 0.045, "eval_batches": 8, "eval_batch_size": 32, "lr": 0.03, "steps": 200, "eval_every": 4}


@pytest.fixture(scope="module")
def stopped_early(tmp_path_factory):
    told = Listens()
    run = train(tiny(**EASY, save_every=1000, resume_every=4), root=tmp_path_factory.mktemp("runs"), progress=told)
    assert any("reached at step" in line for line in told.lines)
    return run


def test_early_stop_ends_at_the_first_evaluation_that_is_good_enough(stopped_early):
    accuracy = {r["step"]: r["accuracy"] for r in read_metrics(stopped_early.path) if r["split"] == "validation"}
    end = max(accuracy)
    assert 4 < end < 200
    assert accuracy[end] >= 0.045
    assert all(a < 0.045 for step, a in accuracy.items() if step < end)
    assert stopped_early.status["state"] == "finished"
    assert stopped_early.status["step"] == end
    assert stopped_early.steps == [0, end]


def test_a_run_killed_right_after_its_early_stop_does_not_train_on(stopped_early, tmp_path):
    """The kill falls between the last resume point and the word `finished`."""
    end = stopped_early.status["step"]
    shutil.copytree(stopped_early.path, tmp_path / "killed")
    killed = Run(tmp_path / "killed")
    killed.write_status("running", 0)
    assert resume(killed).status["step"] == end
    assert killed.steps == [0, end]


def test_a_huge_learning_rate_ends_as_diverged_with_only_finite_checkpoints(tmp_path):
    with pytest.raises(Diverged, match=r"diverged; try a smaller train.lr than 1e\+30; last good checkpoint: step \d+"):
        train(tiny(lr=1e30, save_every=1, clip=None), root=tmp_path, name="wild")
    run = Run(tmp_path / "wild")
    assert issubclass(Diverged, RunFailed)
    assert run.status["state"] == "diverged"
    assert "diverged" in run.status["message"]
    assert run.steps[0] == 0
    for tensors in saved(run.path).values():
        assert all(t.isfinite().all() for t in tensors.values())
    run.load()


def test_the_last_good_checkpoint_is_named_although_it_is_still_being_written(tmp_path, monkeypatch):
    write = checkpoints.write_checkpoint
    monkeypatch.setattr(checkpoints, "write_checkpoint", lambda *args: (time.sleep(0.2), write(*args)))
    with pytest.raises(Diverged, match="last good checkpoint: step 0"):
        train(tiny(lr=1e30, clip=None), root=tmp_path, name="wild")


def test_weights_that_overflow_in_the_last_update_are_not_saved(tmp_path):
    with pytest.raises(Diverged):
        train(tiny(lr=3e38, beta1=0.0, warmup=0, steps=1, save_every=1, weight_decay=10.0), root=tmp_path, name="wild")
    run = Run(tmp_path / "wild")
    assert run.status["state"] == "diverged"
    assert run.steps == [0]
    assert run.checkpoints.resume_steps() == []


def test_a_diverged_run_writes_no_nan_into_its_metrics(tmp_path):
    with pytest.raises(Diverged):
        train(tiny(lr=1e30, log_every=1, eval_every=1, clip=None), root=tmp_path, name="wild")
    assert "NaN" not in (tmp_path / "wild" / "metrics.jsonl").read_text()
    assert "Infinity" not in (tmp_path / "wild" / "metrics.jsonl").read_text()


def test_a_diverged_run_exits_with_1_and_one_line(tmp_path, capsys, monkeypatch):
    from circuitscope.cli.main import main

    flags = "--length 16 --pairs 2 --vocab-size 64 --d-model 8 --batch-size 8 --threads 1 --steps 12 --lr 1e30"
    monkeypatch.setattr("sys.argv", ["circuitscope", "train", *flags.split(), "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "diverged" in lines[0]


def test_an_unwritable_disk_ends_as_failed_and_says_what_is_safe(tmp_path, monkeypatch):
    """The fault tests do this with real disks; here every file from step 6 on is refused."""
    from circuitscope.runs import store

    replace = store.os.replace

    def refuse(source, target):
        if "step-00000006" in str(target):
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "replace", refuse)
        with pytest.raises(RunFailed, match=r"No space left on device.*last checkpoint: step 3"):
            train(tiny(), root=tmp_path, name="full")
    run = Run(tmp_path / "full")
    assert run.status["state"] == "failed"
    assert sorted(saved(run.path)) == [0, 3]


def test_a_run_records_how_it_was_made(run):
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["threads"] == 1
    assert environment["device"] == "cpu"
    assert torch.__version__.startswith(environment["versions"]["torch"].split("+")[0])
    assert environment["created"] > 0


def test_training_leaves_torchs_settings_as_they_were(tmp_path):
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.random.get_rng_state()
    train(tiny(steps=1), root=tmp_path)
    assert torch.get_num_threads() == before[0]
    assert torch.are_deterministic_algorithms_enabled() == before[1]
    assert torch.equal(torch.random.get_rng_state(), before[2])
