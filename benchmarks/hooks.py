"""(g) What hooks cost when nobody listens: one forward against a hook-free copy."""

import torch

from benchmarks.plain_model import PlainLM
from benchmarks.rows import Section, alternate, costs
from benchmarks.workload import SHAPES, trainer_at
from circuitscope.kernels.attention import fused_attention

_NOTE = (
    "the other side is a plain module with the same weights and the same attention kernel, without hook points and"
    " einops; eval mode, no gradients"
)


@torch.no_grad()
def measure(quick: bool) -> Section:
    shape, rounds, calls = SHAPES[0], 2 if quick else 200, 1 if quick else 5
    with trainer_at(shape) as trainer:
        model = trainer.model.eval()
        copy = PlainLM(model, fused_attention).eval()
        batch = trainer.config.task.batch(0, size=shape.batch)
        tokens, (where, _) = batch.tokens, batch.labelled()
        if not torch.allclose(model(tokens, where), copy(tokens, where), atol=1e-5):
            raise RuntimeError("the copy without hooks gives different logits")
        hooked, plain = alternate([lambda: model(tokens, where), lambda: copy(tokens, where)], rounds, calls)
        hooked_body, plain_body = alternate([lambda: model.hidden(tokens), lambda: copy.hidden(tokens)], rounds, calls)
    labelled, everywhere = f"logits at labelled positions; {_NOTE}", f"all positions; {_NOTE}"
    return Section(
        [
            costs(f"forward with unused hooks, {shape}", hooked, plain, 1.03, labelled),
            costs(f"the same without unembedding, {shape}", hooked_body, plain_body, 1.03, everywhere),
        ]
    )
