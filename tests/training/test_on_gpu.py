"""What only a CUDA device can show; `make test-gpu` runs it."""

import pytest
import torch

from circuitscope.progress import Silent
from circuitscope.runs.run import Run, create_run
from circuitscope.training.device import set_up
from circuitscope.training.trainer import Trainer, resume, train
from tiny_run import Crash, CrashAt, saved, tiny

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("mixers", ["attention", "mamba", "mamba2", "gated_deltanet"])
def test_no_step_and_no_checkpoint_synchronizes(tmp_path, mixers):
    config = tiny(device="cuda", mixers=mixers, steps=20)
    trainer = Trainer(create_run(config, root=tmp_path), config, CUDA, Silent())
    with set_up(CUDA, config.train):
        trainer.build()
        for _ in range(3):  # kernels are compiled and memory is taken
            trainer.update()
            trainer.step += 1
        record = trainer.ranks.record(trainer.run)
        with record.writer(1) as trainer.writer:
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(5):
                    trainer.update()
                    trainer.step += 1
                    trainer._save()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert len(saved(trainer.run.path)) == 5


@pytest.mark.parametrize("mixers", ["attention", "mamba", "mamba2", "gated_deltanet"])
def test_a_deterministic_run_resumes_to_the_same_bits(tmp_path, mixers):
    options = {"device": "cuda", "mixers": mixers, "deterministic": True}
    whole = train(tiny(**options), root=tmp_path, name="whole")
    with pytest.raises(Crash):
        train(tiny(**options), root=tmp_path, name="broken", progress=CrashAt(6))
    broken = resume(Run(tmp_path / "broken"))
    assert all(torch.equal(weight, saved(whole.path)[12][name]) for name, weight in saved(broken.path)[12].items())
