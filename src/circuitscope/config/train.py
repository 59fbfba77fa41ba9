"""The training part of a run's config."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from circuitscope.section import Added, DefaultBy, Section, Unit

_RECORDS = {"log_every", "save_every", "save_schedule", "resume_every", "keep_resume", "tensorboard", "wandb"}
_MACHINE = {"device", "threads", "deterministic"}
_EVALUATION = {"eval_every", "eval_batches", "eval_batch_size", "early_stop"}


class TrainConfig(Section):
    """How a run is optimized, evaluated and saved."""

    steps: Annotated[int, Unit("steps")] = Field(
        default=1500, ge=1, lt=10**8, description="optimizer steps of the whole run"
    )
    batch_size: Annotated[int, Unit("examples")] = Field(
        default=64, ge=1, lt=2**31, description="examples in each step's batch"
    )
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate, which the warmup ends at")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="learning rate after the warmup: it stays at lr (constant), or falls to 0 at the last step,"
        " in a straight line (linear) or along half a cosine (cosine)",
    )
    schedule_every: Annotated[int, Added(3, before=1), Unit("steps")] = Field(
        default=1,
        ge=1,
        lt=10**8,
        description="steps between changes of a falling rate; with the steps of an epoch it falls once per epoch",
    )
    warmup: Annotated[float, Unit("share of the steps")] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="first part of the run, in which the learning rate rises in a straight line to lr; 0: no warmup",
    )
    warmup_steps: Annotated[int | None, Added(2, before=None), Unit("steps"), DefaultBy("none: as warmup says")] = (
        Field(default=None, ge=0, lt=10**8, description="length of the warmup in steps, in place of a share of the run")
    )
    lr_groups: Annotated[dict[str, float], Added(2, before={}), Unit("factors of lr")] = Field(
        default_factory=dict,
        description="factors of lr by parameter name, such as {'*.A_log': 0.1}; of several that match, the last counts",
    )
    weight_decay: float = Field(
        default=1.0,
        ge=0,
        description="AdamW's decay: each step shrinks a matrix by the factor 1 - learning rate · weight_decay; norms,"
        " biases and what a mixer exempts have none",
    )
    decay_on: Annotated[Literal["matrices", "all"], Added(3, before="matrices")] = Field(
        default="matrices",
        description="what weight_decay shrinks: matrices that no mixer exempts, or all parameters",
    )
    beta1: Annotated[float, Unit("share kept per step")] = Field(
        default=0.9, ge=0, lt=1, description="AdamW's memory of the mean gradient"
    )
    beta2: Annotated[float, Unit("share kept per step")] = Field(
        default=0.999, ge=0, lt=1, description="AdamW's memory of the mean squared gradient"
    )
    clip: Annotated[float | None, Unit("gradient norm")] = Field(
        default=1.0, gt=0, description="a gradient over all parameters that is longer is cut to this; none: no clipping"
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="seed of the initial weights and, by default, of the examples"
    )
    data_seed: Annotated[int | None, DefaultBy("none: the same as seed")] = Field(
        default=None, ge=0, lt=2**63, description="seed of the examples, training and held-out"
    )

    eval_every: Annotated[int, Unit("steps")] = Field(
        default=50,
        ge=1,
        description="steps between evaluations on held-out examples; the last step always has one",
    )
    eval_batches: Annotated[int, Unit("batches")] = Field(
        default=8, ge=1, description="held-out batches per evaluation, each time the same ones"
    )
    eval_batch_size: Annotated[int, Unit("examples")] = Field(
        default=64, ge=1, lt=2**31, description="examples in each held-out batch"
    )
    log_every: Annotated[int, Unit("steps")] = Field(
        default=10, ge=1, description="steps between rows of metrics.jsonl on the training loss"
    )
    early_stop: Annotated[float | None, Unit("the task's metric")] = Field(
        default=None,
        gt=0,
        description="stop once the metric on held-out examples is as good: an accuracy (a share of the answers, at most"
        " 1) at least this, an error at most this; none: never",
    )

    save_every: Annotated[int, Unit("steps")] = Field(
        default=100, ge=1, description="steps between checkpoints; the first and the last step are always saved"
    )
    save_schedule: Literal["every", "log"] = Field(
        default="every",
        description="every: steps 0, save_every, 2 · save_every …; log: also steps 1, 2, 4 … up to save_every",
    )
    resume_every: Annotated[int, Unit("steps")] = Field(
        default=250, ge=1, description="steps between resume points (weights and optimizer state)"
    )
    keep_resume: Annotated[int, Unit("resume points")] = Field(
        default=4, ge=1, description="how many resume points are kept, spread over the run"
    )

    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="where to train; auto: CUDA if there is one, else Apple's GPU (mps), else the CPU"
    )
    threads: Annotated[int | None, Unit("threads"), DefaultBy("none: torch's choice")] = Field(
        default=None, ge=1, le=1024, description="CPU threads"
    )
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"], DefaultBy("auto: bfloat16 autocast on CUDA, float32 elsewhere")
    ] = Field(default="auto", description="number format of the computation; the weights are float32")
    deterministic: Annotated[bool, Added(4, before=False)] = Field(
        default=False,
        description="on a GPU, use only kernels that give the same bits each time, also where others are faster; on a"
        " CPU all are",
    )
    tensorboard: bool = Field(default=False, description="also write TensorBoard events into the run's folder")
    wandb: str | None = Field(default=None, description="also log to this Weights & Biases project; none: do not")

    @field_validator("lr_groups")
    @classmethod
    def _positive_factors(cls, value: dict[str, float]) -> dict[str, float]:
        for pattern, factor in value.items():
            if factor < 0:
                raise ValueError(f"expected factors of at least 0, got {factor:g} for {pattern!r}")
        return value

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
