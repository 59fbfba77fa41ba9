"""A task answers for itself: roles, features, loss, metric, chance, baselines, sizes; also one of another package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import circuitscope as cs
from circuitscope.config import RunConfig
from circuitscope.registry import Registry
from circuitscope.tasks import NO_LABEL, TASKS, Batch, Role, Task

OWN = [
    "ar",
    "compound_recall",
    "copy",
    "fuzzy_recall",
    "ginc",
    "induction",
    "mqar",
    "regbench",
    "selective_copy",
    "stacked_mqar",
    "two_hop",
]
ON_VECTORS = [
    "chain_of_thought",
    "decision_tree",
    "linear_regression",
    "many_outlier",
    "orthogonal_outlier",
    "sparse_linear",
    "sparse_parity",
    "two_layer_network",
    "vector_mqar",
]
own = pytest.mark.parametrize("name", OWN)
all_own = pytest.mark.parametrize("name", [*OWN, *ON_VECTORS])


def test_the_tasks_of_this_package_are_registered():
    assert sorted(TASKS.own()) == sorted([*OWN, *ON_VECTORS])
    assert set(OWN) <= set(cs.tasks.names())


@all_own
def test_roles_and_features_are_those_of_its_batches(name):
    task = cs.task(name)
    layout = task.batch(0).layout
    assert {Role(r) for r in layout.roles.unique().tolist()} == set(task.roles)
    assert ("pairs" in task.features) == (layout.key_pos is not None)
    assert ("answers" in task.features) == (layout.value_pos is not None and layout.key_pos is None)
    assert ("period" in task.features) == (layout.period is not None)


@all_own
def test_the_small_example_is_small_and_sizes_are_its_fields(name):
    task = cs.task(name, **TASKS[name].small)
    assert task.max_length <= 24
    assert task.sizes()
    for field, size in task.sizes().items():
        assert getattr(task, field) == size


@own
def test_a_model_of_the_sizes_it_needs_takes_the_task(name):
    task = cs.task(name, **TASKS[name].small)
    model = cs.model("attention", d_model=8, **task.needs())
    loss, accuracy = task.evaluate(model, task.batch(0, size=4))
    assert loss == pytest.approx(torch.tensor(task.vocab_size).log().item(), rel=0.1)
    assert 0 <= accuracy <= 1


@pytest.mark.parametrize("name", ON_VECTORS)
def test_the_loss_of_vectors_is_their_error_at_the_labels(name):
    task = cs.task(name, **TASKS[name].small)
    model = cs.model("attention", d_model=8, **task.needs())
    batch = task.batch(0, size=16)
    answers, labels = model(batch.inputs).flatten(0, 1), batch.labels.flatten(0, 1)
    there = ~labels.isnan().any(dim=1)
    answers, labels = answers[there], labels[there]
    if name == "sparse_parity":
        expected = F.binary_cross_entropy_with_logits(answers, (labels > 0).float())
        metric = ((answers > 0) == (labels > 0)).float().mean()
    else:
        expected = metric = (answers - labels).square().sum(dim=1).mean()
    loss, measured = task.loss(model, batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(measured(), metric.detach())
    assert not measured().requires_grad
    assert task.evaluate(model, batch) == (pytest.approx(loss.item(), rel=1e-5), pytest.approx(metric.item(), rel=1e-5))
    assert task.reached(2.0, 1.0) == task.larger_is_better != task.reached(1.0, 2.0)


@pytest.mark.parametrize("name", [name for name in OWN if TASKS[name].metric == "accuracy"])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_metric_are_cross_entropy_and_accuracy_at_the_labels(name, tied):
    task = cs.task(name, **TASKS[name].small)
    model = cs.model("attention", d_model=8, tied=tied, embed_std=1.0, **task.needs())
    batch = task.batch(0, size=64)
    logits = model(batch.tokens).flatten(0, 1)
    labels = batch.labels.flatten()
    expected = F.cross_entropy(logits, labels, ignore_index=NO_LABEL)
    right = (logits.argmax(-1) == labels)[labels != NO_LABEL].float().mean()
    loss, metric = task.loss(model, batch)
    torch.testing.assert_close(loss, expected)
    assert metric() == right
    assert tied or right > 0  # a tied model that has learned nothing answers with the token it reads
    assert task.evaluate(model, batch) == (pytest.approx(expected.item(), rel=1e-5), right.item())
    gradient = torch.autograd.grad(loss, model.embed.weight)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, model.embed.weight)[0])
    assert not metric().requires_grad


@own
def test_a_run_takes_every_value_of_the_tasks_recipe(name):
    config = RunConfig.build("lstm", name)
    for path, value in TASKS[name].recipe.items():
        section, _, field = path.partition(".")
        assert getattr(getattr(config, section), field) == value


@own
def test_chance_is_what_its_first_baseline_scores(name):
    task = cs.task(name)
    batch = task.batch(0, split="test", size=32)
    scored = [baseline(batch) for baseline in task.baselines.values()]
    assert all(one.shape == batch.labelled()[1].shape for one in scored)
    if task.chance is not None:
        assert task.chance_words == next(iter(task.baselines))
        assert scored[0].mean().item() == pytest.approx(task.chance)


@own
@pytest.mark.parametrize("rows", [slice(2, 5), torch.tensor([5, 0, 5])])
def test_a_part_of_a_batch_has_its_part_of_the_layout(name, rows):
    batch = cs.task(name, **TASKS[name].small).batch(0, size=6)
    part, places = batch.part(rows), torch.arange(6)[rows].tolist()
    assert len(part) == 3
    for one, row in enumerate(places):
        assert torch.equal(part.tokens[one], batch.tokens[row])
        assert torch.equal(part.labels[one], batch.labels[row])
        assert torch.equal(part.layout.roles[one], batch.layout.roles[row])
        if batch.layout.value_pos is not None:
            assert torch.equal(part.layout.answer_pos()[one], batch.layout.answer_pos()[row])
            assert torch.equal(part.layout.query_pos[one], batch.layout.query_pos[row])


def test_analyses_give_each_part_of_a_batch_its_own_layout(monkeypatch, tmp_path):
    """Removal goes through the test sequences in slices, and these are some of the sequences."""
    from circuitscope.analysis import probes
    from circuitscope.analysis.probes import removal
    from tiny_run import tiny

    seen: list[Batch] = []
    accuracy = removal.accuracy

    def seen_by(model, batch, hooks):
        seen.append(batch)
        return accuracy(model, batch, hooks)

    monkeypatch.setattr(removal, "accuracy", seen_by)
    run = cs.train(tiny(), root=tmp_path)
    probes.probe(run, "own-token", steps=12, sequences=60, hooks=["blocks.0.hook_resid_post"], causal=True)
    assert seen
    for batch in seen:
        assert len(batch.layout.roles) == len(batch.layout.query_pos) == len(batch) < 60
        asked = batch.labels != NO_LABEL
        assert torch.equal(asked, batch.layout.roles == Role.QUERY)


class Doubling(Task):
    """Vectors: at each position, twice the input. What a task on vectors looks like to the trainer."""

    inputs = "vectors"
    metric = "error"
    roles = (Role.FILLER,)
    name: str = "doubling"

    @property
    def max_length(self) -> int:
        return 3

    def generate(self, key, examples):
        raise NotImplementedError

    def needs(self):
        return {"max_length": 3}

    def loss(self, model, batch):
        error = (model(batch.inputs) - 2 * batch.inputs).square().mean()
        return error, error.detach

    @torch.no_grad()
    def evaluate(self, model, batch):
        loss, metric = self.loss(model, batch)
        return loss.item(), metric().item()

    def shown(self, metric):
        return f"squared error {metric:.3f}"


def test_a_task_on_vectors_has_its_own_loss_and_metric():
    task, model = Doubling(), torch.nn.Linear(2, 2)
    x = torch.randn(4, 3, 2)
    batch = Batch(x, x, cs.Layout(torch.zeros(4, 3, dtype=torch.int8)))
    before = task.evaluate(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        loss, metric = task.loss(model, batch)
        assert metric() == loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert task.evaluate(model, batch)[1] < 0.01 * before[1]
    assert (task.chance, task.baselines, task.sizes()) == (None, {}, {"length": 3})


def test_an_outside_task_cannot_take_a_name_of_ours():
    registry: Registry[type[Task]] = Registry("task", "tasks")
    registry.add("mqar", TASKS["mqar"], "circuitscope.tasks.mqar")
    with pytest.raises(cs.UserError, match="cannot register the task 'mqar': that name is circuitscope's own"):
        registry.register("mqar")(Doubling)
    assert registry["mqar"] is TASKS["mqar"]


@pytest.fixture
def installed(tmp_path):
    """The toy package as pip leaves it: a module, and metadata that names it under circuitscope.tasks."""
    folder = tmp_path / "site"
    about = folder / "toy_recency-0.1.dist-info"
    about.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("toy_recency.py"), folder)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-recency\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[circuitscope.tasks]\nrecency = toy_recency\n")

    def run(*words: object) -> str:
        script = (
            f"import sys; sys.path.append({str(folder)!r}); from circuitscope.cli.main import main;"
            f" sys.argv = ['circuitscope', *{[str(word) for word in words]!r}]; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_a_task_of_an_installed_package_is_listed_shown_and_trained_on_like_ours(installed, tmp_path):
    assert re.search(r"^recency +Marks 1 and 2 come in random order", installed("tasks"), re.MULTILINE)
    shown = installed("tasks", "show", "recency")
    assert "mark   one of the two tokens to tell apart" in shown
    assert "query  a key again" in shown
    sizes = ["--vocab-size", 4, "--layers", 1, "--d-model", 8, "--steps", 120, "--lr", 0.03, "--threads", 1]
    out = installed("train", "--task", "recency", *sizes, "--name", "toy")
    assert "validation accuracy 100.0% at step 120" in out
    assert "toy: attention on recency (length 8)" in installed("analyze", "runs/toy", "--decay", "--sequences", 8)


@pytest.mark.parametrize("options", [{}, {"shared_vocabulary": True}, {"noise": 2}, {"updates": 1}], ids=str)
def test_mqar_says_the_loss_of_an_answer_that_ignores_the_sequence(options):
    assert_context_free(cs.task("mqar", length=24, pairs=4, vocab_size=32, **options))


@own
def test_the_context_free_loss_is_that_of_the_frequencies_of_the_labels(name):
    task = cs.task(name, **TASKS[name].small)
    if task.context_free is None:
        assert name in {"copy", "ginc", "regbench"}  # whose labels depend on what stands before them, or have end marks
    else:
        assert_context_free(task)


def assert_context_free(task):
    """The entropy of 200,000 labels or so, to which random frequencies are no more than a hundredth."""
    labels = torch.cat([task.batch(step, size=8192).labelled()[1] for step in range(6)])
    share = labels.bincount().double() / len(labels)
    entropy = -(share[share > 0] * share[share > 0].log()).sum().item()
    assert task.context_free == pytest.approx(entropy, abs=0.01)


def test_the_context_free_loss_of_vectors_is_that_of_answering_with_their_mean():
    task = cs.task("vector_mqar", **TASKS["vector_mqar"].small)
    batch = task.batch(0, size=4096)
    labels = batch.labelled()[1]
    assert batch.losses(labels.mean(dim=0).expand_as(labels)).mean().item() == pytest.approx(
        task.context_free, rel=0.01
    )
