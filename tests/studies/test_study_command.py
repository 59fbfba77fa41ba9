"""Studies on disk, their verdicts, and `circuitscope study`."""

import pytest
import yaml

from circuitscope.cli.main import main
from circuitscope.errors import UserError
from circuitscope.studies.study import read_study
from circuitscope.studies.verdict import claims, outcome_words, verdict
from made_up_sweeps import made_up_sweep

SOLVES = {"name": "solves", "quantity": "best_test_accuracy", "holds_if": {"at_least": 0.95}}
STUDY = {"question": "Does it?", "source": "a paper", "claim": "It does.", "criteria": [SOLVES]}
AXES = {"train.seed": [1, 2], "train.lr": [1e-3, 1e-2]}


def study(folder, accuracy=lambda *_: 0.97, **changes):
    made_up_sweep(folder, lambda trial: (a := accuracy(trial)) and {"accuracy": a}, axes=AXES)
    (folder / "study.yaml").write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return folder


def run(monkeypatch, capsys, *argv):
    monkeypatch.setattr("sys.argv", ["circuitscope", *map(str, argv)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("accuracy", "otherwise", "words"),
    [
        (lambda _: 0.97, "not reproduced", "reproduced as a laptop analogue"),
        (lambda _: 0.5, "not reproduced", "not reproduced"),
        (lambda _: 0.5, "undecided", "undecided"),
        (lambda t: 0.97 if t.values["train.seed"] == 1 else None, "not reproduced", "undecided"),
        (lambda _: None, "not reproduced", "not run"),
    ],
)
def test_the_verdict_follows_from_the_table(tmp_path, accuracy, otherwise, words):
    folder = study(tmp_path / "one", accuracy, criteria=[{**SOLVES, "otherwise": otherwise}])
    assert verdict(read_study(folder)).words == words


def test_a_failure_that_refutes_outweighs_one_that_decides_nothing(tmp_path):
    both = [{**SOLVES, "otherwise": "undecided"}, {**SOLVES, "name": "fails"}]
    assert verdict(read_study(study(tmp_path / "one", lambda _: 0.5, criteria=both))).words == "not reproduced"


@pytest.mark.parametrize(
    ("accuracy", "words", "premise"),
    [
        (lambda t: 0.96 if t.values["train.lr"] == 1e-3 else 0.5, "not reproduced", "holds"),
        (lambda _: 0.5, "undecided", "fails in 1 of 1 cells, and without it nothing is decided"),
        (lambda t: None if t.values["train.lr"] == 1e-3 else 0.5, "undecided", "not run"),
        (lambda _: 0.96, "reproduced as a laptop analogue", "holds"),
    ],
)
def test_while_a_premise_does_not_hold_a_failure_refutes_nothing(tmp_path, accuracy, words, premise):
    at = [{**SOLVES, "where": {"train.lr": rate}} for rate in AXES["train.lr"]]
    folder = study(tmp_path / "one", accuracy, criteria=[{**at[0], "name": "first", "premise": True}, at[1]])
    found = verdict(read_study(folder))
    assert found.words == words
    assert outcome_words(found.judged[0]) == premise


def test_the_scale_of_the_paper_is_judged_apart(tmp_path):
    folder = study(tmp_path / "one", lambda _: 0.5)
    assert verdict(read_study(folder), "paper") is None
    study(folder / "paper", lambda _: 0.97)
    assert verdict(read_study(folder), "laptop").words == "not reproduced"
    assert verdict(read_study(folder), "paper").words == "reproduced"


def test_the_page_of_claims_gives_the_budget_of_the_scale_it_is_of(tmp_path):
    folder = study(tmp_path / "one", budget="4,000 steps")
    study(folder / "paper")
    both = [verdict(read_study(folder), scale) for scale in ("laptop", "paper")]
    laptop, paper = claims(both).split("## one, ")[1:]
    assert "Budget: 4,000 steps." in laptop
    assert "Budget" not in paper


def test_list_and_verdict_name_every_study_and_write_the_page_of_claims(tmp_path, monkeypatch, capsys):
    study(tmp_path / "first")
    study(tmp_path / "second", lambda t: 0.5 if t.values["train.lr"] < 5e-3 else None)
    code, out, _ = run(monkeypatch, capsys, "study", "list", "--studies", tmp_path)
    assert code == 0
    lines = [line.split() for line in out.splitlines()[1:]]
    assert [line[:3] for line in lines] == [["first", "laptop", "4/4"], ["second", "laptop", "2/4"]]
    assert run(monkeypatch, capsys, "study", "verdict", "--studies", tmp_path)[0] == 0
    page = (tmp_path / "CLAIMS.md").read_text()
    assert "| [first](first) | It does. | laptop | reproduced as a laptop analogue |" in page
    assert "| [second](second) | It does. | laptop | not reproduced |" in page
    assert "0.970" in page
    code, out, _ = run(monkeypatch, capsys, "study", "verdict", "first", "--studies", tmp_path)
    assert code == 0
    assert "second" not in out


def test_plot_draws_the_evidence_and_the_grid_of_a_study_from_its_table(tmp_path, monkeypatch, capsys):
    study(tmp_path / "one")
    words = ("study", "plot", "one", "--studies", tmp_path, "--out", tmp_path / "figures", "--runs", tmp_path / "none")
    assert run(monkeypatch, capsys, *words)[0] == 0
    for name in ("one.png", "one-grid.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 5000


def test_a_grid_that_cannot_be_drawn_does_not_keep_the_others_from_it(tmp_path, monkeypatch, capsys):
    several = [{**SOLVES, "name": name, "grid": name} for name in ("seeds", "rates")]
    folder = study(tmp_path / "one", criteria=several)
    made_up_sweep(folder / "seeds", lambda _: {"accuracy": 0.97}, axes={"train.seed": [1, 2]})
    made_up_sweep(folder / "rates", lambda _: {"accuracy": 0.97}, axes=AXES)
    words = ("study", "plot", "one", "--studies", tmp_path, "--out", tmp_path / "figures", "--runs", tmp_path / "none")
    code, out, err = run(monkeypatch, capsys, *words)
    assert code == 0
    assert [line.rpartition("/")[2] for line in out.splitlines()] == ["one.png", "one-rates-grid.png"]
    assert "not drawn: seeds has no axis to draw along" in err


def test_the_paper_scale_of_another_study_is_below_that_study(tmp_path):
    study(tmp_path / "other")
    study(tmp_path / "other" / "paper", lambda _: 0.5)
    reads = study(tmp_path / "one", criteria=[{**SOLVES, "grid": "../other"}])
    assert verdict(read_study(reads), "laptop").words == "reproduced as a laptop analogue"
    assert verdict(read_study(reads), "paper").words == "not reproduced"


def test_a_grid_that_no_criterion_reads_counts_as_trials_and_not_for_the_verdict(tmp_path, monkeypatch, capsys):
    folder = study(tmp_path / "one", exploratory=["wider"])
    with pytest.raises(UserError, match="wider"):
        verdict(read_study(folder))
    made_up_sweep(
        folder / "wider", lambda trial: {"accuracy": 0.1} if trial.values["train.seed"] == 1 else None, axes=AXES
    )
    found = verdict(read_study(folder))
    assert (found.done, found.trials, found.words) == (6, 8, "reproduced as a laptop analogue")
    assert read_study(folder).grids("laptop") == [folder, folder / "wider"]
    study(folder / "paper")
    assert verdict(read_study(folder), "paper").trials == 4
    words = ("study", "plot", "one", "--studies", tmp_path, "--out", tmp_path / "figures", "--runs", tmp_path / "none")
    assert run(monkeypatch, capsys, *words)[0] == 0
    assert (tmp_path / "figures" / "one-wider-grid.png").is_file()


def test_a_grid_is_either_read_by_a_criterion_or_exploratory(tmp_path):
    folder = study(tmp_path / "one", criteria=[{**SOLVES, "grid": "wider"}], exploratory=["wider"])
    with pytest.raises(UserError, match="a criterion reads the grid 'wider'"):
        read_study(folder)


def test_a_folder_without_studies_gets_no_page_of_claims(tmp_path, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "study", "verdict", "--studies", tmp_path)
    assert code == 2
    assert "no study" in err
    assert not (tmp_path / "CLAIMS.md").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("verdict", "oen"), "unknown study 'oen'; did you mean 'one'? valid: one"),
        (("verdict", "x" * 300), "unknown study"),
        (("run", "one", "--scale", "paper"), "one has no grid at the paper scale"),
        (("run", "one", "--scale", "huge"), "huge"),
    ],
)
def test_bad_words_get_one_line(tmp_path, monkeypatch, capsys, words, says):
    study(tmp_path / "one")
    code, _, err = run(monkeypatch, capsys, "study", *words, "--studies", tmp_path)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"criteria": []}, "criteria"),
        ({"criteria": [{**SOLVES, "holds_if": {}}]}, "exactly one of at_least, at_most and within"),
        ({"criteria": [{**SOLVES, "holds_if": {"within": 0.1}}]}, "within needs a level"),
        ({"criteria": [{**SOLVES, "qantity": "x"}]}, "qantity"),
        ({"criteria": [{**SOLVES, "premise": True, "otherwise": "undecided"}]}, "a premise takes no otherwise"),
        ({"clam": "x"}, "clam"),
        ({"criteria": [SOLVES, SOLVES]}, "two criteria have the same name"),
    ],
)
def test_a_study_file_that_says_nothing_or_too_much_is_refused_by_name(tmp_path, changes, says):
    folder = study(tmp_path / "one", **changes)
    with pytest.raises(UserError, match=says) as refused:
        read_study(folder)
    assert "study.yaml" in str(refused.value)


@pytest.mark.slow
def test_run_trains_what_the_table_lacks_and_then_there_is_a_verdict(tmp_path, monkeypatch, capsys):
    folder = study(tmp_path / "one", lambda _: None)
    grid = yaml.safe_load((folder / "grid.yaml").read_text())
    small = {"steps": 2, "batch_size": 2, "warmup_steps": 1, "eval_batches": 1, "eval_batch_size": 4, "device": "cpu"}
    grid["base"]["train"] |= small
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid))
    words = ("study", "run", "one", "--studies", tmp_path, "--runs", tmp_path / "runs", "--jobs", 1)
    assert run(monkeypatch, capsys, *words)[0] == 0
    assert verdict(read_study(folder)).words == "not reproduced"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"criteria": [{**SOLVES, "premise": True}]}, "at least one must be no premise"),
        ({"criteria": [{**SOLVES, "grid": "/somewhere"}]}, "expected a folder of the study"),
        ({"criteria": [{**SOLVES, "grid": ".."}]}, "expected a folder of the study"),
        ({"criteria": [{**SOLVES, "by": "ratio"}]}, "by needs than"),
        ({"criteria": [{**SOLVES, "holds_if": {"within": -1, "above": "chance"}}]}, "within needs a level"),
    ],
)
def test_a_study_that_could_not_be_judged_is_refused(tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        read_study(study(tmp_path / "one", **changes))


def test_what_is_wrong_with_a_criterion_names_its_study(tmp_path):
    folder = study(tmp_path / "one", criteria=[{**SOLVES, "where": {"train.seed": 7}}])
    with pytest.raises(UserError, match=r"one/study\.yaml: criterion 'solves'"):
        verdict(read_study(folder))


def test_a_table_with_two_rows_of_a_trial_is_refused(tmp_path):
    folder = study(tmp_path / "one")
    table = folder / "results.csv"
    table.write_text(table.read_text() + table.read_text().splitlines(keepends=True)[-1])
    with pytest.raises(UserError, match=r"results\.csv: two rows of the trial"):
        verdict(read_study(folder))


def test_the_page_of_claims_stays_a_table_whatever_a_claim_says(tmp_path):
    folder = study(tmp_path / "one", claim="It | does.\nSo.\n")
    page = claims([verdict(read_study(folder))])
    assert r"| [one](one) | It \| does. So. | laptop |" in page
