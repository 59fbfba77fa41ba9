"""`circuitscope tasks export`, `tasks check` and `evaluate`, as a person calls them."""

import hashlib
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import circuitscope as cs
from circuitscope.cli.main import app
from tiny_run import TINY


def ran(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_an_exported_file_holds_the_examples_and_their_digest(tmp_path):
    path = tmp_path / "out.parquet"
    said = ran("tasks", "export", "mqar", "--examples", 20, path, "--set", "vocab_size=64", "--seed", 3)
    batch = cs.task("mqar", vocab_size=64).batch(0, split="test", size=20, seed=3)
    frame = pd.read_parquet(path)
    assert frame.tokens.tolist() == pytest.approx(batch.tokens.numpy())
    assert np.array_equal(np.stack(frame.labels), batch.labels.numpy())
    assert [cs.Role.named(name) for name in frame.roles[0]] == batch.layout.roles[0].tolist()
    digest = hashlib.sha256(batch.tokens.numpy().tobytes() + batch.labels.numpy().tobytes()).hexdigest()
    assert digest in said
    about = json.loads(pq.read_schema(path).metadata[b"circuitscope"])
    assert about == {"task": cs.task("mqar", vocab_size=64).describe(), "split": "test", "seed": 3, "digest": digest}
    assert f"20 examples of mqar, digest {digest}, as written" in " ".join(ran("tasks", "check", path).split())


def test_a_changed_file_and_one_of_somebody_else_are_refused(tmp_path):
    path = tmp_path / "out.parquet"
    ran("tasks", "export", "two_hop", path, "--examples", 3)
    table = pq.read_table(path)
    tokens = table["tokens"].to_pylist()
    tokens[1][0] += 1
    kind = table.schema.field("tokens").type
    changed = table.set_column(0, "tokens", pa.array(tokens, kind)).replace_schema_metadata(table.schema.metadata)
    pq.write_table(changed, path)
    with pytest.raises(cs.UserError, match="was changed: its digest is"):
        ran("tasks", "check", path)
    pd.DataFrame({"tokens": [1]}).to_parquet(path)
    with pytest.raises(cs.UserError, match="no file that `circuitscope tasks export` has written"):
        ran("tasks", "check", path)
    with pytest.raises(cs.UserError, match="there is no folder"):
        ran("tasks", "export", "mqar", tmp_path / "nowhere" / "out.parquet")
    with pytest.raises(cs.UserError, match="did you mean 'validation'"):
        ran("tasks", "export", "mqar", path, "--split", "validaton")


@pytest.mark.parametrize(("task", "measure"), [("mqar", "accuracy on updated keys"), ("copy", "generated exact match")])
def test_evaluate_prints_the_measures_of_the_task_beside_its_baselines(tmp_path, task, measure):
    options = {key: value for key, value in TINY.items() if task == "mqar" or key not in ("length", "pairs")}
    also = {"updates": 1} if task == "mqar" else {"longest": 6}
    run = cs.train(model="attention", task=task, root=tmp_path, name="tiny", **options, **also)
    table = cs.evaluate(run, sequences=70)
    model = table[table.of == "the model"].set_index("measure")
    assert {"loss", "perplexity", "accuracy", measure} <= set(model.index)
    loss, accuracy = run.config.task.evaluate(run.load(), run.batch(0, size=70))
    assert model.value["loss"] == pytest.approx(loss, rel=1e-5)
    assert model.value["accuracy"] == pytest.approx(accuracy)
    assert model.value["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    assert ((table.low <= table.value) & (table.value <= table.high)).all()
    assert set(table.of) == {"the model", *run.config.task.baselines}
    said = ran("evaluate", run.path, "--sequences", 70)
    assert f"tiny: {task}, 70 sequences of the test split" in said
    for row in table.itertuples():
        assert f"{row.measure} " in said
        assert f"{row.low:.4f} to {row.high:.4f}" in said

    for count, says in ((1, "at least 2 sequences"), (2**31, "at most 100,000 sequences")):
        with pytest.raises(cs.UserError, match=says):
            cs.evaluate(run, sequences=count)


def test_evaluate_says_what_a_model_without_recurrent_steps_cannot_be_measured_by(tmp_path, monkeypatch):
    options = {key: value for key, value in TINY.items() if key not in ("length", "pairs")}
    run = cs.train(model="lstm", task="copy", longest=6, root=tmp_path, name="tiny", **options)
    monkeypatch.delattr(type(run.load().layers[0].mixer), "step")
    said = ran("evaluate", run.path, "--sequences", 10)
    why = "generation needs recurrent steps, and layer 0 (lstm) has no `step`"
    assert f"generated exact match is not measured: {why}" in said
    assert f"generated accuracy is not measured: {why}" in said
