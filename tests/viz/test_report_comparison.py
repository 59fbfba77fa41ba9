"""What a report says about runs together: what distinguishes each, and the table of their results."""

import json

from made_up_runs import made_up_run

from circuitscope.viz.report.comparison import compared


def told(verdict="bump with accuracy", binding=None, recall=None, circuit=("a sentence",)):
    parts = [{"score": name, "place": place} for name, place in (("binding", binding), ("recall", recall)) if place]
    return {"verdict": [verdict, "why"], "parts": parts, "circuit": list(circuit)}


def column(found, name):
    (one,) = [column for column in found["table"] if column["name"] == name]
    return [text for text, _ in one["cells"]]


def test_runs_say_the_fields_in_which_they_differ(tmp_path):
    runs = [made_up_run(tmp_path, f"run-{i}", seed=i, lr=lr) for i, lr in ((1, 0.01), (2, 1e-5))]
    found = compared(runs, [told(), told()])
    assert found["differs"] == [["lr 0.01", "seed 1"], ["lr 1e-05", "seed 2"]]
    assert column(found, "seed") == ["1", "2"]
    assert [c["cells"][0][1] for c in found["table"] if c["name"] == "lr"] == [0.01]  # a number to sort by
    alone = compared(runs[:1], [told()])
    assert alone == {"table": [], "differs": [[]]}
    same = compared([runs[0], runs[0]], [told(), told()])
    assert same["differs"] == [[], []]


def test_fields_of_the_same_name_are_told_apart(tmp_path):
    runs = [made_up_run(tmp_path, name) for name in ("a", "b")]
    text = (runs[1].path / "config.yaml").read_text()
    text = text.replace("vocab_size: 64", "vocab_size: 256", 1).replace("vocab_size: 64", "vocab_size: 128")
    (runs[1].path / "config.yaml").write_text(text)
    found = compared(runs, [told(), told()])["differs"]
    assert found[1] == ["model.vocab_size 256", "task.vocab_size 128"]


def test_values_of_a_config_read_as_words(tmp_path):
    one = made_up_run(tmp_path, "one", recipe="plain")
    other = made_up_run(tmp_path, "other", mixers="mamba,attention", tied=False, clip=None, recipe="plain")
    found = compared([one, other], [told(), told()])["differs"]
    assert found == [["mixers attention", "tied yes", "clip 1"], ["mixers mamba + attention", "tied no", "clip none"]]


def test_the_table_has_accuracy_the_step_to_99_percent_the_verdict_and_the_parts_of_the_circuit(tmp_path):
    runs = [made_up_run(tmp_path, "a"), made_up_run(tmp_path, "b", steps=900), made_up_run(tmp_path, "c")]
    rows = [json.loads(line) for line in (runs[2].path / "metrics.jsonl").read_text().splitlines()]
    (runs[2].path / "metrics.jsonl").write_text("\n".join(json.dumps(r) for r in rows if r["split"] == "train"))
    found = compared(runs, [told(binding="L0H0", recall="L1H0"), told("no bump"), told(recall="L0 ssm")])
    names = ["accuracy", "step to 99%", "verdict", "binding", "recall"]
    assert [c["name"] for c in found["table"]][:5] == names
    assert column(found, "accuracy") == ["100.0%", "7.6%", "–"]
    assert column(found, "step to 99%") == ["1200", "–", "–"]  # 1 / (1 + exp(−185 / 40)) is 99%
    assert column(found, "verdict") == ["bump with accuracy", "no bump", "bump with accuracy"]
    assert column(found, "binding") == ["L0H0", "–", "–"]
    assert column(found, "recall") == ["L1H0", "–", "L0 ssm"]
    without = compared(runs, [told(circuit=())] * 3)
    assert not {"binding", "recall"} & {c["name"] for c in without["table"]}
