"""The training part of a run's config."""

from typing import Literal

from pydantic import Field

from circuitscope.section import Section

_RECORDS = {"log_every", "save_every", "save_schedule", "resume_every", "keep_resume", "tensorboard", "wandb"}
_MACHINE = {"device", "threads"}
_EVALUATION = {"eval_every", "eval_batches", "eval_batch_size", "early_stop"}


class TrainConfig(Section):
    """How a run is optimized, evaluated and saved."""

    steps: int = Field(default=1500, ge=1, lt=10**8, description="optimizer steps")
    batch_size: int = Field(default=64, ge=1, lt=2**31, description="examples per step")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after the warmup"
    )
    warmup: float = Field(default=0.1, ge=0, le=1, description="share of the steps with a rising rate")
    weight_decay: float = Field(default=1.0, ge=0, description="AdamW's decay of matrices; norms and biases have none")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the mean gradient")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's decay of the mean squared gradient")
    clip: float | None = Field(default=1.0, gt=0, description="largest gradient norm; none: no clipping")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="seed of the initial weights and, by default, of the examples"
    )
    data_seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="seed of the examples; none: the same as seed"
    )

    eval_every: int = Field(default=50, ge=1, description="steps between evaluations on held-out examples")
    eval_batches: int = Field(default=8, ge=1, description="batches per evaluation")
    eval_batch_size: int = Field(default=64, ge=1, lt=2**31, description="examples per evaluation batch")
    log_every: int = Field(default=10, ge=1, description="steps between rows of metrics on the training loss")
    early_stop: float | None = Field(
        default=None, gt=0, le=1, description="stop at this validation accuracy; none: never"
    )

    save_every: int = Field(default=100, ge=1, description="steps between checkpoints")
    save_schedule: Literal["every", "log"] = Field(
        default="every", description="log: 1, 2, 4 … and then every save_every"
    )
    resume_every: int = Field(default=250, ge=1, description="steps between resume points (weights and optimizer)")
    keep_resume: int = Field(default=4, ge=1, description="resume points kept, spread over the run")

    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="where to train")
    threads: int | None = Field(default=None, ge=1, le=1024, description="CPU threads; none: torch's choice")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: bfloat16 autocast on CUDA, float32 elsewhere"
    )
    tensorboard: bool = Field(default=False, description="also write TensorBoard events")
    wandb: str | None = Field(default=None, description="also log to this Weights & Biases project")

    @property
    def batch_seed(self) -> int:
        """The seed of the examples: `data_seed`, or `seed` where there is none."""
        return self.seed if self.data_seed is None else self.data_seed

    def without_effect(self) -> frozenset[str]:
        """Fields that say what is recorded and where the run is computed, and how it is evaluated.

        With `early_stop`, the evaluations decide which weights are the last. Then they do have an effect, and
        a run that was stopped early is not taken for one that was not.
        """
        return frozenset(_RECORDS | _MACHINE | (_EVALUATION if self.early_stop is None else set()))
