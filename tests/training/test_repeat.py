"""Repeating a stretch of a run: the same bits where it had saved, denser in between."""

import pytest

from circuitscope.errors import UserError
from circuitscope.runs.run import Run
from circuitscope.runs.store import read_tensors, write_tensors
from circuitscope.training.repeat import repeat
from circuitscope.training.trainer import train
from tiny_run import listing, same_bits, saved, tiny


@pytest.fixture
def run(tmp_path):
    return train(tiny(), root=tmp_path, name="sparse")


def test_the_stretch_comes_out_equal_and_denser(run, tmp_path):
    dense = train(tiny(save_every=1), root=tmp_path, name="dense")
    before = listing(run.path / "checkpoints")
    done = repeat(run, first=5, last=9, every=1)
    assert (done.began, done.equal, done.differs) == (4, [6, 9], None)
    assert done.added == [5, 7, 8]
    assert run.steps == [0, 3, 5, 6, 7, 8, 9, 12]
    after = listing(run.path / "checkpoints")
    assert {name: after[name] for name in before} == before  # nothing saved was touched
    all_steps = saved(dense.path)
    assert all(same_bits(tensors, all_steps[step]) for step, tensors in saved(run.path).items())


def test_without_a_resume_point_it_starts_from_the_seed(run):
    assert repeat(run, first=1, last=3, every=1).began == 0
    assert run.steps == [0, 1, 2, 3, 6, 9, 12]


def test_a_repetition_that_differs_adds_nothing_and_says_where(run):
    path = run.path / "checkpoints" / "step-00000009.safetensors"
    tensors, metadata = read_tensors(path)
    tensors["embed.weight"][0, 0] += 1.0
    write_tensors(path, tensors, metadata)
    done = repeat(run, first=4, last=12, every=1)
    assert done.equal == [6]
    assert done.added == [4, 5]
    assert done.differs is not None
    assert done.differs[0] == 9
    assert done.differs[1] == pytest.approx(1.0)
    assert run.steps == [0, 3, 4, 5, 6, 9, 12]
    assert not (run.path / "checkpoints" / ".repeated").exists()


def test_it_runs_on_to_the_next_saved_step_for_proof_but_adds_none_there(run):
    done = repeat(run, first=4, last=7, every=1)
    assert (done.equal, done.added) == ([6, 9], [4, 5, 7])


def test_repeating_twice_adds_nothing_the_second_time(run):
    repeat(run, first=3, last=9, every=2)
    before = listing(run.path / "checkpoints")
    assert repeat(run, first=3, last=9, every=2).added == []
    assert listing(run.path / "checkpoints") == before


@pytest.mark.parametrize("bad", [{"first": 9}, {"first": 3, "every": 0}, {"first": -1}])
def test_impossible_stretches_are_refused(run, bad):
    with pytest.raises(UserError, match="cannot repeat"):
        repeat(run, **{"last": 6, "every": 1, **bad})


def test_a_run_that_is_being_written_is_left_alone(run):
    lock = Run(run.path).lock()
    try:
        with pytest.raises(UserError, match="is being written"):
            repeat(run, first=3, last=6, every=1)
    finally:
        lock.release()
