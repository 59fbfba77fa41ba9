"""Labels, positions and candidates are those of the batch; definitions say no to what does not exist."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.probes import TARGETS, Definition, examples_of, shipped, target
from circuitscope.analysis.probes.over_run import ProbeData
from circuitscope.errors import UserError


def defined(**fields):
    return Definition.parse({"target": "bound-value", "roles": ["query"], "model": "embedding", **fields})


@pytest.fixture(scope="module")
def batch():
    return cs.task("mqar", length=32, pairs=3, vocab_size=64).batch(0, size=20)


def by_hand(batch):
    """Bindings of each sequence as the task's text has them: k1 v1 k2 v2 …"""
    for tokens in batch.tokens.tolist():
        yield tokens, {tokens[i]: tokens[i + 1] for i in (0, 2, 4)}


def test_bound_value_is_the_label_of_the_query(batch):
    e = examples_of(defined(), batch)["query"]
    assert len(e) == 20 * 3
    rows = list(by_hand(batch))
    for sequence, pos, label, candidates in zip(e.sequence, e.pos, e.label, e.candidates, strict=True):
        tokens, bound = rows[sequence]
        assert label == bound[tokens[pos]] == batch.labels[sequence, pos]
        assert candidates.tolist() == list(bound.values())


def test_bound_key_is_the_token_before_a_context_value(batch):
    e = examples_of(defined(target="bound-key", roles="value"), batch)["value"]
    rows = list(by_hand(batch))
    assert sorted(set(e.pos)) == [1, 3, 5]
    for sequence, pos, label, candidates in zip(e.sequence, e.pos, e.label, e.candidates, strict=True):
        tokens, bound = rows[sequence]
        assert label == tokens[pos - 1]
        assert candidates.tolist() == list(bound)


def test_own_and_previous_token_and_position_at_each_role(batch):
    tokens = batch.tokens.numpy()
    own = examples_of(defined(target="own-token", roles="each"), batch)
    assert set(own) == {"key", "value", "query", "filler"}
    assert sum(len(e) for e in own.values()) == tokens.size
    previous = examples_of(defined(target="previous-token", roles="each"), batch)
    assert sum(len(e) for e in previous.values()) == tokens.size - 20  # the first has none before it
    position = examples_of(defined(target="position", roles=["key"], model="logistic"), batch)["key"]
    for e, expected in [*[(e, 0) for e in own.values()], *[(e, -1) for e in previous.values()]]:
        assert (e.label == tokens[e.sequence, e.pos + expected]).all()
        assert (e.identity == tokens[e.sequence, e.pos]).all()
        for row, (sequence, label) in enumerate(zip(e.sequence, e.label, strict=True)):
            offered = e.candidates[row][e.candidates[row] >= 0]
            assert sorted(offered) == sorted(set(tokens[sequence]))
            assert label in offered
    assert (position.label == position.pos).all()
    assert position.candidates is None


def test_the_activation_can_be_read_before_the_query_or_at_the_end_of_the_context(batch):
    own, before, end = (examples_of(defined(at=at), batch)["query"] for at in ("own", "before", "context-end"))
    for e in (own, before, end):
        assert (e.label == own.label).all()
        assert (e.anchor == own.pos).all()
    assert (before.pos == own.pos - 1).all()
    assert (end.pos == 5).all()


def test_the_activation_can_be_read_after_the_position(batch):
    own, after = (examples_of(defined(target="bound-key", roles="value", at=at), batch)["value"] for at in ("own", 1))
    assert (after.pos == own.pos + 1).all()
    assert (after.label == own.label).all()
    assert (after.anchor == own.pos).all()
    last = examples_of(defined(target="own-token", roles="each", at="+3"), batch)
    assert max(e.pos.max() for e in last.values()) == 31
    assert sum(len(e) for e in last.values()) == 20 * 29  # those that would leave the sequence are left out
    with pytest.raises(UserError, match=r"at: \+40 is outside the sequence at every query"):
        examples_of(defined(at="+40"), batch)


def test_yaml_and_a_name_may_say_plus_one(tmp_path):
    (tmp_path / "mine.yaml").write_text("target: bound-key\nroles: value\nat: +1\nmodel: embedding\n")
    by_name = Definition.load("bound-key+1")
    assert (Definition.load(tmp_path / "mine.yaml").at, by_name.at, by_name.name) == ("+1", "+1", "bound-key+1")
    assert by_name.model_copy(update={"at": "own", "name": "bound-key"}) == Definition.load("bound-key")
    assert [defined(at=at).offset for at in ("own", "before", "context-end", 0, -1, "+2")] == [0, -1, None, 0, -1, 2]


@pytest.mark.parametrize("at", ["after", "-2", -2, "+0", "+x", True, "value+1"])
def test_another_place_is_refused_in_one_line(at):
    with pytest.raises(UserError, match=r"^at: expected own, before, \+1 .* or context-end, got"):
        defined(at=at)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bound-kye+1", "unknown probe 'bound-kye\\+1'; did you mean 'bound-key'"),
        ("bound-key+one", "unknown probe 'bound-key\\+one'; did you mean 'bound-key'"),
        ("bound-value-in-state+1", "says itself where it reads, at: before"),
    ],
)
def test_a_name_with_a_plus_that_does_not_fit_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        Definition.load(name)


def test_at_most_so_many_of_a_role_in_a_sequence(batch):
    filler = examples_of(defined(target="own-token", roles=["filler"]), batch)["filler"]
    few = filler.at_most(4)
    assert (np.bincount(few.sequence) == 4).all()
    assert (np.diff(few.sequence) >= 0).all()
    pairs = set(zip(few.sequence, few.pos, few.label, strict=True))
    assert len(pairs) == 80
    assert pairs <= set(zip(filler.sequence, filler.pos, filler.label, strict=True))
    assert len(np.unique(few.pos)) > 10  # not the first four
    assert len(filler.at_most(1000)) == len(filler)


def test_a_test_sequence_that_equals_a_training_sequence_is_left_out():
    batch = cs.task("mqar", length=4, pairs=1, vocab_size=4, filler="zero", examples=None).batch(0, size=60)
    data = ProbeData(defined(target="own-token", roles=["key", "value"]), batch)
    rows = [tuple(row) for row in batch.tokens.tolist()]
    train = set(rows[: data.n_train])
    assert not any(rows[s] in train for e in data.examples.values() for s in e.sequence if s >= data.n_train)
    assert data.kept.sum() < 60


def test_each_leaves_out_roles_where_the_label_never_changes():
    batch = cs.task("induction", block=5, repeats=2, vocab_size=32, varied=False).batch(0, size=30)
    assert set(ProbeData(defined(target="position", roles="each", model="logistic"), batch).examples) == {"block"}
    assert set(examples_of(defined(target="position", roles="each", model="logistic"), batch)) == {"start", "block"}


def test_the_weight_vector_of_a_regression_is_one_label_a_sequence(batch):
    w = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    carried = replace(batch, weights=w)
    e = examples_of(defined(target="weight-vector", roles=["value"], model="ridge"), carried)["value"]
    np.testing.assert_array_equal(e.label, w.numpy()[e.sequence])


def test_a_batch_without_the_vector_is_refused(batch):
    with pytest.raises(UserError, match="weight-vector needs a batch that carries the weight vector"):
        examples_of(Definition.load("weight-vector"), batch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"roles": ["block"]}, "no position of this task has the role 'block'; bound-value has labels at: query"),
        ({"target": "own-token", "roles": ["start"]}, "unknown role 'start'; .*valid: filler, key, query, value"),
        ({"roles": ["key"]}, "bound-value has no label at role 'key'; bound-value has labels at: query"),
        ({"target": "own-token", "candidates": "context"}, "own-token has no candidates in the context"),
        ({"model": "candidates", "candidates": "vocabulary"}, "needs a set"),
    ],
)
def test_what_the_task_does_not_have_is_refused(batch, fields, message):
    with pytest.raises(UserError, match=message):
        examples_of(defined(**fields), batch)


def test_pairs_need_a_task_with_pairs():
    repeats = cs.task("induction", block=5, repeats=2, vocab_size=32).batch(0, size=4)
    for definition in (defined(), defined(target="own-token", roles=["block"], at="context-end")):
        with pytest.raises(UserError, match="needs a task with keys, values and queries"):
            examples_of(definition, repeats)


def test_every_probe_of_the_package_loads_and_says_what_it_asks():
    expected = {"own-token", "previous-token", "bound-key", "bound-value", "position", "weight-vector"}
    assert expected <= set(shipped())
    for name in shipped():
        definition = Definition.load(name)
        assert definition.name == name
        assert definition.about
    assert {Definition.load(name).target for name in shipped()} == set(TARGETS.own())


def test_a_probe_is_found_by_name_from_any_folder_and_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Definition.load("bound-value").target == "bound-value"
    (tmp_path / "mine.yaml").write_text("target: own-token\nroles: each\nmodel: embedding\n")
    for path in ("mine.yaml", "./mine.yaml", tmp_path / "mine.yaml"):
        assert Definition.load(path).name == "mine"
    assert Definition.load(Definition.load("mine.yaml")).name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target: [own-token", "is not valid YAML"),
        ("- own-token", "a probe is a mapping with target, roles and model, got list"),
        ("", "target: Field required"),
        ("target: own-token\nroles: each\nmodel: embedding\nhook: x\n", "unknown key 'hook'; did you mean 'hooks'"),
        ("target: own-tokn\nroles: each\nmodel: embedding\n", "unknown target 'own-tokn'; did you mean 'own-token'"),
        ("target: own-token\nroles: [vale]\nmodel: embedding\n", "unknown role 'vale'; did you mean 'value'"),
        ("target: own-token\nroles: each\nmodel: ridge\n", "is a token, which the model 'ridge' does not decode"),
        ("target: own-token\nroles: each\nmodel: lasso\n", "unknown model 'lasso'.*valid: candidates, embedding"),
        ("target: own-token\nroles: each\nmodel: embedding\ncandidates: all\n", "unknown candidate set 'all'"),
        ("target: position\nroles: each\nmodel: logistic\ncandidates: sequence\n", "candidates are for the models"),
        ("target: own-token\nroles: []\nmodel: embedding\n", "at least one role"),
        ("target: own-token\nroles: each\nmodel: embedding\nhooks: []\n", "hooks"),
        ("target: own-token\nroles: each\nmodel: embedding\nat: after\n", "at: expected own, before, "),
        ("target: own-token\nroles: each\nmodel: embedding\nper_sequence: 0\n", "per_sequence"),
        ("target: own-token\nroles: 3\nmodel: embedding\n", "roles"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        Definition.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(UserError, match="unknown probe 'bound-vale'; did you mean 'bound-value'"):
        Definition.load("bound-vale")
    with pytest.raises(UserError, match=r"no probe file nowhere/x\.yaml; probes by name: .*bound-key"):
        Definition.load("nowhere/x.yaml")


# -- a target of somebody else ------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """The registry of targets, which forgets afterwards what a test adds."""
    for what in ("_things", "_from"):
        monkeypatch.setattr(TARGETS, what, dict(getattr(TARGETS, what)))
    return TARGETS


def test_a_target_registers_in_one_line(registry, batch):
    @target("next-token", "the token one position later", "token")
    def following(batch):
        return torch.cat([batch.tokens[:, 1:], torch.full((len(batch), 1), -1)], dim=1)

    definition = defined(target="next-token", roles=["key"], candidates="sequence")
    e = examples_of(definition, batch)["key"]
    assert (e.label == batch.tokens.numpy()[e.sequence, e.pos + 1]).all()
    with pytest.raises(UserError, match=r"unknown target 'next-tokn'; did you mean 'next-token'\? valid: .*next-token"):
        defined(target="next-tokn")
    with pytest.raises(UserError, match="next-token is a token, which the model 'ridge' does not decode"):
        defined(target="next-token", model="ridge")


def test_a_target_from_outside_has_candidates_of_its_own(registry, batch):
    @target("first-token", "the first token", "token", context=lambda batch: batch.tokens[:, :5])
    def first(batch):
        return batch.tokens[:, :1].expand_as(batch.tokens)

    e = examples_of(defined(target="first-token", roles=["query"]), batch)["query"]
    np.testing.assert_array_equal(e.candidates, batch.tokens.numpy()[e.sequence, :5])


def test_no_target_takes_the_name_of_another(registry):
    with pytest.raises(UserError, match="cannot register the target 'position': that name is circuitscope's own"):
        target("position", "mine", "class")(lambda batch: batch.tokens)


@pytest.mark.parametrize(("kind", "model", "shape"), [("class", "logistic", "20, 32"), ("vector", "ridge", "20, d")])
def test_labels_of_another_shape_are_refused(registry, batch, kind, model, shape):
    target("bad", "not by position", kind)(lambda batch: torch.zeros(7, 3))
    with pytest.raises(UserError, match=rf"the target bad gives labels \[7, 3\]; expected \[{shape}\]"):
        examples_of(defined(target="bad", model=model), batch)


def test_an_installed_package_brings_targets_by_an_entry_point(registry, monkeypatch, tmp_path):
    (tmp_path / "parity_targets.py").write_text(
        "from circuitscope.analysis.probes import target\n\n"
        "@target('parity', 'whether the token is odd', 'class')\n"
        "def parity(batch):\n"
        "    return batch.tokens % 2\n"
    )
    info = tmp_path / "parity_targets-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parity-targets\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[circuitscope.targets]\nparity = parity_targets\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_loaded", False)
    assert defined(target="parity", roles="each", model="logistic").target == "parity"
