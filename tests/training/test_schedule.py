"""Learning rates, save steps, and which resume points stay."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from circuitscope.config.rate import learning_rate
from circuitscope.config.train import TrainConfig
from circuitscope.runs.checkpoints import spread
from circuitscope.training.schedule import saves_checkpoint, saves_resume_point


def rates(**options):
    config = TrainConfig(**options)
    return [learning_rate(step, config) for step in range(config.steps)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_rises_in_equal_steps_to_the_peak_over_the_first_tenth(schedule):
    rate = rates(steps=100, lr=0.5, schedule=schedule)
    assert rate[:10] == pytest.approx([0.05 * (i + 1) for i in range(10)])
    assert max(rate) == rate[9] == 0.5


def test_without_warmup_the_first_update_has_the_peak_rate():
    assert rates(steps=10, lr=0.5, warmup=0)[0] == 0.5


def test_constant_stays_at_the_peak():
    assert set(rates(steps=50, lr=0.5)[5:]) == {0.5}


def test_linear_falls_in_equal_steps_that_would_reach_zero_right_after_the_last():
    rate = rates(steps=50, lr=0.5, schedule="linear")[5:]
    falls = [a - b for a, b in zip(rate, [*rate[1:], 0.0], strict=True)]
    assert falls == pytest.approx([0.5 / 45] * 45)


def test_cosine_is_half_a_cosine():
    rate = rates(steps=50, lr=0.5, schedule="cosine")[5:]
    assert rate == pytest.approx([0.25 * (1 + math.cos(math.pi * i / 45)) for i in range(45)])
    assert all(a > b for a, b in pairwise(rate))


@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)
def test_every_update_has_a_positive_rate_of_at_most_the_peak(steps, warmup, schedule):
    rate = rates(steps=steps, warmup=warmup, schedule=schedule, lr=0.5)
    assert all(0 < r <= 0.5 for r in rate)


def steps_saved(**options):
    config = TrainConfig(**options)
    return [s for s in range(config.steps + 1) if saves_checkpoint(s, config)]


def test_every_saves_first_last_and_multiples():
    assert steps_saved(steps=25, save_every=10) == [0, 10, 20, 25]


def test_log_adds_powers_of_two_up_to_the_first_multiple():
    assert steps_saved(steps=45, save_every=20, save_schedule="log") == [0, 1, 2, 4, 8, 16, 20, 40, 45]


@given(st.integers(1, 400), st.integers(1, 500), st.sampled_from(["every", "log"]))
def test_first_and_last_are_always_saved(steps, every, schedule):
    got = steps_saved(steps=steps, save_every=every, save_schedule=schedule)
    assert got[0] == 0
    assert got[-1] == steps


def test_resume_points_come_at_multiples_and_at_the_end_but_not_at_zero():
    config = TrainConfig(steps=25, resume_every=10)
    assert [s for s in range(26) if saves_resume_point(s, config)] == [10, 20, 25]


@given(st.sets(st.integers(1, 10_000), min_size=1, max_size=40), st.integers(1, 16))
def test_spread_keeps_the_newest_and_as_many_as_allowed(steps, keep):
    kept = spread(list(steps), keep)
    assert len(kept) == min(keep, len(steps))
    assert set(kept) <= steps
    assert kept == sorted(kept)
    assert kept[-1] == max(steps)


@pytest.mark.parametrize("every", [1, 7, 250])
@pytest.mark.parametrize("keep", range(1, 17))
def test_a_rewind_never_starts_further_away_than_twice_an_even_spread(keep, every):
    """After every save of a long run: the largest distance from a step back to a kept point, or to step 0
    (which follows from the seed), is at most 2 · steps / keep, and one save interval."""
    kept: list[int] = []
    for step in range(every, 2000 * every + 1, every):
        kept = spread([*kept, step], keep)
        gap = max(b - a for a, b in pairwise([0, *kept]))
        assert gap <= 2 * step / keep + every, f"{gap} steps at step {step}: {kept}"


def test_a_warmup_in_steps_does_not_depend_on_the_budget():
    rates = [
        [learning_rate(step, TrainConfig(steps=steps, warmup_steps=10, lr=1.0)) for step in range(30)]
        for steps in (30, 300)
    ]
    assert rates[0] == rates[1]
    assert rates[0][:10] == [(step + 1) / 10 for step in range(10)]
    assert set(rates[0][10:]) == {1.0}


def test_a_rate_that_falls_once_per_epoch_is_that_of_torchs_cosine_stepped_after_each_epoch():
    import torch

    config = TrainConfig(steps=40, lr=0.5, warmup=0, schedule="cosine", schedule_every=5)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.0)
    for epoch in range(8):
        for step in range(5 * epoch, 5 * epoch + 5):
            assert learning_rate(step, config) == pytest.approx(cosine.get_last_lr()[0])
        optimizer.step()
        cosine.step()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_rate_that_changes_every_step_is_to_the_bit_what_it_was_before_there_was_a_choice(schedule):
    config = TrainConfig(steps=70, lr=1e-3, warmup=0.1, schedule=schedule)
    for step in range(7, 70):
        progress = (step - 7) / 63
        before = {"constant": 1e-3, "linear": 1e-3 * (1 - progress)}
        assert learning_rate(step, config) == before.get(schedule, 1e-3 * 0.5 * (1 + math.cos(math.pi * progress)))
