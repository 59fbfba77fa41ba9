"""What one layer of attention has learned where it stops at 1/k; writes what_it_is.csv and a figure of it.

    python studies/one_layer_attention/what_it_is.py           # draws the table again
    python studies/one_layer_attention/what_it_is.py runs/one_layer_attention runs/conv_on_attention

For each run that is there (of one_layer_attention, and as a control those of conv_on_attention with a causal conv on K)
it measures the following and puts it into the table; what the table has of other runs stays:

- where its loss ends between that of any value of the vocabulary (ln(V/2) if keys and values have halves of it) and
  ln k, that of any value of the context;
- how much of a query's weight is on the values of the context, and on the bound one: if it does not look for the
  match, the second is a k-th of the first;
- what cutting the edges from queries to all values costs, and to the bound value alone;
- whether the answer changes when the queried key is exchanged for another key of the same context, and whether it
  changes to the value of that key.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import circuitscope as cs
from circuitscope.analysis import knock_out
from circuitscope.sweeps.grid import Trial, read_grid
from circuitscope.viz.style import COLOURS, GREY, Sheet, look, plain, save

HERE = Path(__file__).parent
TABLE = HERE / "what_it_is.csv"
SEQUENCES = 512
CONTROL, CONTROL_NAME = "k", "attention, conv on K"  # on the axis model.mixers of conv_on_attention; in the table


def row(trial: Trial, run: cs.Run) -> dict[str, Any]:
    """What is measured of one run, at its last checkpoint, on test sequences."""
    task = run.config.task
    model = run.load(step=run.steps[-1])
    batch = task.batch(0, split="test", size=SEQUENCES)
    layout = batch.layout
    at, pair, values = layout.query_pos, layout.query_pair, layout.value_pos
    rows = torch.arange(len(batch))[:, None]
    weight = cs.phi(model, batch.tokens, layer=0).detach().mean(dim=1)[rows, at]  # [batch, query, src]
    on_values = weight.gather(2, values[:, None].expand(-1, at.shape[1], -1))
    answers, offered = _answers(model, batch.tokens, at), batch.tokens[rows, values]
    other = (pair + 1) % values.shape[1]
    exchanged = batch.tokens.clone()
    exchanged[rows, at] = batch.tokens[rows, layout.key_pos.gather(1, other)]
    after = _answers(model, exchanged, at)
    loss, any_token, any_value = _loss(run), task.context_free, math.log(task.pairs)
    cut = {edges: knock_out(model, batch, edges, layer=0) for edges in ("value", "recall")}
    return {
        "digest": trial.digest,
        "model": trial.values.get("model.preset", CONTROL_NAME),
        "seed": run.config.train.seed,
        "lr": run.config.train.lr,
        "d_model": run.config.model.d_model,
        "pairs": task.pairs,
        "shared_vocabulary": task.shared_vocabulary,
        "accuracy": cut["recall"].before,
        "loss": loss,
        "loss_of_any_token": any_token,
        "loss_of_any_value": any_value,
        "way_to_any_value": (any_token - loss) / (any_token - any_value),
        "weight_on_values": float(on_values.sum(dim=2).mean()),
        "weight_on_bound_value": float(on_values.gather(2, pair[:, :, None]).mean()),
        "lost_without_values": cut["value"].lost,
        "lost_without_bound_value": cut["recall"].lost,
        "answers_are_values": float((answers[:, :, None] == offered[:, None]).any(dim=2).float().mean()),
        "answer_changes": float((answers != after).float().mean()),
        "answer_follows_the_key": float((after == offered.gather(1, other)).float().mean()),
    }


def _answers(model: Any, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The likeliest token at each query. [batch, query]"""
    with torch.no_grad():
        return model(tokens).argmax(dim=-1).gather(1, at)


def _loss(run: cs.Run) -> float:
    held = run.metrics[run.metrics.split == "validation"]
    return float(held.loss.iloc[-1])


def figure(table: pd.DataFrame) -> Sheet:
    """Left: where a query looks, and whether the answer follows its key. Right: where the loss ends, by width."""
    plain_ones = table[(table.model == "attention") & ~table.shared_vocabulary]
    control = table[table.model == CONTROL_NAME]
    with look():
        sheet = Sheet(table=lambda: table, figsize=(7.4, 3.0), layout="constrained")
        left, right = sheet.subplots(1, 2)
        at_64 = plain_ones[plain_ones.d_model == 64]
        several = {
            "weight_on_values": ("o", "weight of a query on all values"),
            "weight_on_bound_value": ("s", "weight on the bound value"),
            "answer_follows_the_key": ("x", "answer follows an exchanged key"),
        }
        for (column, (marker, words)), colour in zip(several.items(), COLOURS, strict=False):
            left.plot(at_64.pairs, at_64[column], marker, color=colour, ms=4.5, ls="", label=words)
            if len(control):
                left.plot(control.pairs * 1.25, control[column], marker, color=colour, ms=4.5, ls="", mfc="none")
        pairs = sorted(set(at_64.pairs))
        left.plot(pairs, [1 / k for k in pairs], ":", color=GREY, lw=1, label="1/k")
        if len(control):
            left.plot([], [], "s", color=GREY, mfc="none", ls="", label="right of k = 16: with a conv on K")
        for width, colour in zip(sorted(set(plain_ones.d_model)), COLOURS, strict=False):
            of_width = plain_ones[plain_ones.d_model == width]
            right.plot(of_width.pairs, of_width.loss, "o", color=colour, ms=4.5, label=f"width {width}")
        right.plot(pairs, [math.log(k) for k in pairs], ":", color=GREY, lw=1, label="any value of the context, ln k")
        level = float(plain_ones.loss_of_any_token.iloc[0])
        right.axhline(level, color=GREY, ls="--", lw=0.8, label="any value of the vocabulary")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(pairs, [str(k) for k in pairs])
            axes.set_xlabel("pairs k")
            plain(axes)
        left.set_ylabel("share")
        right.set_ylabel("validation loss at the end")
        right.set_ylim(0, level * 1.08)
        left.legend(frameon=False, fontsize=6.5)
        right.legend(frameon=False, fontsize=6.5, loc="upper left", bbox_to_anchor=(0, 0.93))
        sheet.suptitle("One layer of attention reads all values alike; width limits how many it can tell apart")
    return sheet


def main() -> None:
    """Measures every run that is there, adds it to the table, and draws the table."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("runs", type=Path, nargs="*", help="folders with runs of the two grids")
    folders = parse.parse_args().runs
    convs = read_grid(HERE.parent / "conv_on_attention").trials
    trials = [*read_grid(HERE).trials, *(trial for trial in convs if trial.values["model.mixers"] == CONTROL)]
    rows = {one["digest"]: one for one in pd.read_csv(TABLE).to_dict("records")} if TABLE.exists() else {}
    for trial in trials:
        for folder in folders:
            path = folder / trial.digest
            if (path / "config.yaml").exists() and cs.Run(path).status.get("state") == "finished":
                rows[trial.digest] = row(trial, cs.Run(path))
                print(trial.label, flush=True)
    ordered = [rows[trial.digest] for trial in trials if trial.digest in rows]
    if not ordered:
        parse.error("the table is empty, and no folder holds a finished run of the grids")
    pd.DataFrame(ordered).to_csv(TABLE, index=False, float_format="%.4g")
    save(figure(pd.read_csv(TABLE)), HERE.parents[1] / "figures/one_layer_attention-what.png")


if __name__ == "__main__":
    main()
