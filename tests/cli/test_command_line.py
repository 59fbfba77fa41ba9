"""The command line: what it prints, how it refuses, and what it does not import."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from circuitscope.cli import main as program
from circuitscope.config import RunConfig
from circuitscope.runs.run import Run
from circuitscope.tasks import Role

EXECUTABLE = Path(sys.executable).with_name("circuitscope")


class Result:
    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def circuitscope(monkeypatch, capsys, tmp_path):
    """Runs the program in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CIRCUITSCOPE_RUNS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["circuitscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            program.main()
        printed = capsys.readouterr()
        return Result(stop.value.code or 0, printed.out, printed.err)

    return run


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_tasks_lists_every_task_with_its_options(circuitscope):
    result = circuitscope("tasks")
    assert result.code == 0
    for expected in ("ar", "induction", "mqar", "pairs", "repeats", "shared_vocabulary"):
        assert expected in result.out


@pytest.mark.parametrize(
    ("name", "legend"),
    [
        ("mqar", ["key", "value", "query", "filler", "label"]),
        ("ar", ["key", "value", "query", "filler", "label"]),
        ("induction", ["start", "filler", "block", "label"]),
    ],
)
def test_show_prints_tokens_over_labels_and_a_legend_of_the_roles(circuitscope, name, legend):
    result = circuitscope("tasks", "show", name, "--examples", "3")
    lines = plain(result.out).splitlines()
    assert result.code == 0
    tokens, labels = ([x.split()[1:] for x in lines if x.startswith(k)] for k in ("tokens", "labels"))
    assert len(tokens) == len(labels) == 3
    for row, marks in zip(tokens, labels, strict=True):
        assert len(row) == len(marks)
        assert any(m != "·" for m in marks)
        assert all(t.isdecimal() for t in row)
    explained = [line.split(maxsplit=1) for line in lines[-len(legend) :]]
    assert [name for name, _ in explained] == legend
    assert explained[0][1] in {role.about for role in Role}


def test_show_prints_the_examples_the_task_makes(circuitscope):
    import circuitscope as cs

    result = circuitscope("tasks", "show", "mqar", "--length", 16, "--pairs", 2, "--step", 3, "--set", "filler=zero")
    batch = cs.task("mqar", length=16, pairs=2, vocab_size=64, filler="zero").batch(3, size=2)
    rows = [x.split() for x in plain(result.out).splitlines()]
    assert [[int(t) for t in r[1:]] for r in rows if r and r[0] == "tokens"] == batch.tokens.tolist()
    shown = [[-100 if t == "·" else int(t) for t in r[1:]] for r in rows if r and r[0] == "labels"]
    assert shown == batch.labels.tolist()


def test_show_colours_each_role_as_figures_do(monkeypatch, circuitscope):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    out = circuitscope("tasks", "show", "mqar", "--examples", "1").out
    styles = set(re.findall(r"\x1b\[([0-9;]+)m *\d+", out))
    hexes = (Role.KEY.colour, Role.VALUE.colour, Role.QUERY.colour, Role.FILLER.colour)
    roles = {"38;2;" + ";".join(str(int(h[i : i + 2], 16)) for i in (1, 3, 5)) for h in hexes}
    assert styles == roles | {"1"}  # labels are bold


def test_dry_run_refuses_the_name_of_a_run_that_exists(circuitscope, tmp_path):
    (tmp_path / "runs/one").mkdir(parents=True)
    result = circuitscope("train", "--dry-run", "--name", "one")
    assert (result.code, result.out) == (2, "")
    assert "runs/one exists already" in result.err


def test_dry_run_prints_the_resolved_config_and_makes_no_run(circuitscope, tmp_path):
    result = circuitscope("train", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert RunConfig.parse(yaml.safe_load(result.out)) == RunConfig()
    assert list(tmp_path.iterdir()) == []


FLAGS = {
    "--layers 3": ("model.n_layers", 3),
    "--d-model 32": ("model.d_model", 32),
    "--heads 4": ("model.mixers.0.n_heads", 4),
    "--positions rope": ("model.positions", "rope"),
    "--mixers attention,attention,attention": ("model.n_layers", 3),
    "--task ar": ("task.name", "ar"),
    "--length 128": ("task.length", 128),
    "--pairs 8": ("task.pairs", 8),
    "--vocab-size 100": ("task.vocab_size", 100),
    "--examples 500": ("task.examples", 500),
    "--examples none": ("task.examples", None),
    "--steps 7": ("train.steps", 7),
    "--batch-size 5": ("train.batch_size", 5),
    "--lr 0.5": ("train.lr", 0.5),
    "--weight-decay 0.1": ("train.weight_decay", 0.1),
    "--warmup 0.2": ("train.warmup", 0.2),
    "--schedule cosine": ("train.schedule", "cosine"),
    "--clip 0.5": ("train.clip", 0.5),
    "--clip none": ("train.clip", None),
    "--eval-every 20": ("train.eval_every", 20),
    "--precision bfloat16": ("train.precision", "bfloat16"),
    "--seed 9": ("train.seed", 9),
    "--early-stop 0.9": ("train.early_stop", 0.9),
    "--device cpu": ("train.device", "cpu"),
    "--threads 2": ("train.threads", 2),
    "--save-every 3": ("train.save_every", 3),
    "--save-schedule log": ("train.save_schedule", "log"),
    "--resume-every 11": ("train.resume_every", 11),
    "--keep-resume 2": ("train.keep_resume", 2),
    "--tensorboard": ("train.tensorboard", True),
    "--wandb project": ("train.wandb", "project"),
    "--recipe paper": ("train.seed", 42),
    "--recipe zoology --layers 1": ("model.state_mixer", "none"),
    "--set model.d_model=128": ("model.d_model", 128),
    "--set model.mixers.1.n_heads=2 --mixers attention,attention": ("model.mixers.1.n_heads", 2),
    "--set task.filler=random": ("task.filler", "random"),
    "--set train.clip=null": ("train.clip", None),
    "--set train.lr=3e-3": ("train.lr", 3e-3),
    "--d-model 32 --set model=mamba": ("model.d_model", 32),
}


@pytest.mark.parametrize("flags", list(FLAGS))
def test_a_flag_changes_its_field_of_the_config(circuitscope, flags):
    path, expected = FLAGS[flags]
    result = circuitscope("train", "--dry-run", *flags.split())
    assert (result.code, result.err) == (0, "")
    value = yaml.safe_load(result.out)
    for part in path.split("."):
        value = value[int(part) if isinstance(value, list) else part]
    assert value == expected
    assert result.out != circuitscope("train", "--dry-run").out


def test_a_config_file_is_repeated_and_flags_change_it(circuitscope, tmp_path):
    config = RunConfig.build(pairs=2, n_heads=4, d_model=16, lr=0.25)
    (tmp_path / "config.yaml").write_text(config.dump())
    assert circuitscope("train", "config.yaml", "--dry-run").out == config.dump()
    changed = yaml.safe_load(circuitscope("train", "config.yaml", "--dry-run", "--heads", 2, "--layers", 2).out)
    assert [m["n_heads"] for m in changed["model"]["mixers"]] == [2, 2]
    assert (changed["train"]["lr"], changed["task"]["pairs"]) == (0.25, 2)


BAD = {
    "train --d-model 63 --heads 2": "n_heads must divide d_model = 63",
    "train --dry-run --pairs 17": "16",
    "train --dry-run --length 63": "63",
    "train --dry-run --steps -1": "train.steps",
    "train --dry-run --lr nan": "train.lr",
    "train --dry-run --lr inf": "train.lr",
    "train --dry-run --lr fast": "--lr",
    "train --dry-run --examples some": "task.examples: expected an integer, got 'some'",
    "train --dry-run --layers abc": "circuitscope: --layers: expected an integer, got 'abc'",
    "train --dry-run --lr fast ": "--lr: expected a number, got 'fast'",
    "train --dry-run --steps 0:10": "--steps: expected an integer, got '0:10'",
    "train --dry-run --set model.d_model=nine": "model.d_model: expected an integer, got 'nine'",
    "train --dry-run --steps 0": "train.steps: expected at least 1, got 0",
    "train --dry-run --model mamba --mixers mamba": "circuitscope: give --model or --mixers, not both",
    "analyze --sequences 1": "--sequences: expected at least 2, got '1'",
    "report --channels many": "--channels: expected an integer, got 'many'",
    "phi --example one": "--example: expected an integer, got 'one'",
    "train --dry-run --positions rotary": "rotary",
    "train --dry-run --mixers atention": "did you mean 'attention'",
    "train --dry-run --task mqra": "did you mean 'mqar'",
    "train --dry-run --set model.d_modle=3": "did you mean 'model.d_model'",
    "train --dry-run --set d_model": "KEY=VALUE",
    "train --dry-run --set train.wd=0.1": "did you mean 'train.weight_decay'",
    "train --dry-run --set train.learning_rate=0.1": "did you mean 'train.lr'",
    "train --dry-run --set train.epochs=3": "did you mean 'train.steps'",
    "train --dry-run --set model.n_heads=2": "did you mean 'model.mixers.*.n_heads'",
    "train --dry-run --set task.seq_len=32": "did you mean 'task.length'",
    "train --dry-run --set seq_len=32": "did you mean 'task.length'",
    "train --dry-run --set train.clip=": "--set train.clip: the value is empty; give one, or null for none",
    "train . --dry-run": "cannot read .: it is a folder, and a config is a file",
    "train --dry-run --set model.d_model=[": "model.d_model",
    "train --dry-run --set train.lr=2001-99-99": "train.lr",
    "train --dry-run --set model=5": "model",
    "train --dry-run --device gpu": "gpu",
    "train --dry-run --model mamba --set model.mixers=attention": "expected a preset or mixers, got both",
    "train --dry-run --model mamba --set model=attention": "'model.preset' is given twice",
    "train --dry-run --pairs 8 --set task.pairs=2": "'task.pairs' is given twice: by --set and by an option of its own",
    "train --dry-run --set train.lr=1 --set train.lr=2": "--set gives 'train.lr' twice",
    "train nowhere.yaml": "nowhere.yaml",
    "train --resume nowhere": "nowhere",
    "train --resume nowhere --steps 5": "--resume",
    "train --stepz 5": "--steps",
    "train --steps": "--steps",
    "train one two": "two",
    "trian": "train",
    "tasks show mqra": "did you mean 'mqar'",
    "tasks show": "name",
    "tasks show mqar --pairs 9": "9",
    "tasks show mqar --step -1": "-1",
    "tasks show mqar --step 99999999999999999999": "99999999999999999999",
    "tasks show mqar --examples 0": "examples",
    "tasks show induction --pairs 3": "pairs",
    "tasks show mqar --examples 1000000000": "use fewer or shorter sequences",
    "tasks show mqar --length 1000000": "100,000 tokens",
    "models --d-model 1048577": "1048576",
    "models hooks mamba --d-model 1048576": "use a smaller --d-model",
    "train --dry-run --d-model 63 --heads 2": "n_heads must divide d_model = 63",
    "train --dry-run --threads 1025": "train.threads",
    "train --dry-run --batch-size 9223372036854775808": "train.batch_size",
    "train --dry-run --batch-size 1000000000": "use fewer or shorter sequences",
    "train --dry-run --set train.eval_batch_size=1000000000": "use fewer or shorter sequences",
    "train --dry-run --examples 1000000000000": "use fewer examples",
    "train --dry-run --vocab-size 2000000000": "use a smaller model",
    "train --dry-run --save-every 9223372036854775808": "train.save_every",
    "train --dry-run --mixers mamba --set model.mixers.*.d_state=1048577": "at most 2^20",
    "train --dry-run --mixers hyena --set model.mixers.*.filter_layers=1048576": "filter_layers",
    "train --dry-run --name a/b": "one folder name",
    "plot dynamics": "no runs",
    "plot dynamics nowhere": "nowhere",
}


@pytest.mark.parametrize("arguments", list(BAD))
def test_bad_input_is_one_line_and_exit_code_2(circuitscope, tmp_path, arguments):
    result = circuitscope(*arguments.split())
    assert result.code == 2, result.err
    assert result.err.count("\n") == 1
    assert result.err.startswith("circuitscope: ")
    assert "Traceback" not in result.err
    assert BAD[arguments] in result.err
    assert result.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["train", "--name", ""], "--name"),
        (["train", "--name="], "--name"),
        (["train", "--task", " "], "--task"),
        (["train", "--runs", ""], "--runs"),
        (["train", "--wandb", ""], "--wandb"),
        (["train", "--set", ""], "--set"),
        (["phi", "--scale", ""], "--scale"),
        (["phi", "--top", "1", "--by", ""], "--by"),
        (["phi", "--mark", ""], "--mark"),
        (["phi", "--factor", ""], "--factor"),
        (["probe", "--probe", "bound-value", "--hooks", ""], "--hooks"),
        (["plot", "decay", ""], "an argument"),
    ],
)
def test_an_empty_text_is_refused_with_the_name_of_its_option(circuitscope, tmp_path, arguments, what):
    result = circuitscope(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"circuitscope: {what} is empty; give it a value, or leave it out\n"
    assert list(tmp_path.iterdir()) == []


def test_names_in_a_config_and_on_the_command_line_cannot_reach_the_terminal_as_they_are(circuitscope, tmp_path):
    hostile = "a\nb\t\x1b[2Jc"
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({"train": {hostile: 1}}))
    (tmp_path / "value.yaml").write_text(yaml.safe_dump({"train": {"lr": hostile}}))
    for arguments in (
        ["train", "bad.yaml", "--dry-run"],
        ["train", "value.yaml", "--dry-run"],
        ["train", f"{hostile}.yaml"],
        ["train", "--name", hostile],
        ["train", "--task", hostile],
        ["train", "--set", f"train.{hostile}=1"],
        ["train", "--resume", hostile],
        ["train", f"--{hostile}"],
        ["train", "--lr", hostile],
        ["analyze", hostile],
        [hostile],
    ):
        result = circuitscope(*arguments)
        assert (result.code, result.out) == (2, ""), arguments
        assert result.err.removesuffix("\n").isprintable(), arguments
        assert "\\x1b[2Jc" in result.err, arguments


def test_a_bad_config_file_with_a_flag_is_one_line(circuitscope, tmp_path):
    for text in ("model: {mixers: []}", "model: 5", "- 1", "model: [1"):
        (tmp_path / "bad.yaml").write_text(text)
        result = circuitscope("train", "bad.yaml", "--dry-run", "--heads", "2")
        assert (result.code, result.err.count("\n")) == (2, 1), (text, result.err)


def test_debug_shows_where_an_error_came_from(monkeypatch):
    from circuitscope.errors import UserError

    monkeypatch.setattr(sys, "argv", ["circuitscope", "--debug", "tasks", "show", "mqra"])
    with pytest.raises(UserError, match="mqra"):
        program.main()


def test_train_help_lists_every_group_and_every_option(circuitscope):
    result = circuitscope("train", "--help")
    out = plain(result.out)
    assert result.code == 0
    for group in ("Model", "Task", "Optimization", "Saving", "Run"):
        assert re.search(rf"─ {group} ─", out), group
    for flag in {word for flags in FLAGS for word in flags.split() if word.startswith("--")} | {"--resume", "--name"}:
        assert flag in out, flag


def _shown_defaults() -> dict[str, str]:
    """The default that `train --help` shows of each option, by flag."""
    from circuitscope.cli.train import train

    options = {name: p.annotation.__metadata__[0] for name, p in inspect.signature(train).parameters.items()}
    return {
        f"--{name.replace('_', '-')}": option.show_default
        for name, option in options.items()
        if isinstance(option.show_default, str)
    }


def test_the_defaults_that_help_shows_are_those_of_the_config(circuitscope):
    """They are typed by hand, so that --help need not load the config; to give one explicitly must change nothing."""
    shown = _shown_defaults()
    in_words = {"--threads": "torch's choice", "--name": "MIXER-TASK-NUMBER", "--runs": "$CIRCUITSCOPE_RUNS or runs"}
    assert in_words.items() <= shown.items()
    without = {"--early-stop", "--wandb", "--tensorboard"}  # off by default
    flags = {flag for words in FLAGS for flag in words.split() if flag.startswith("--")} - {"--set"}
    assert shown.keys() - in_words.keys() == (flags - without - {"--threads"}) | {"--model"}
    plain_run = circuitscope("train", "--dry-run").out
    for flag, default in shown.items():
        if flag not in in_words:
            assert circuitscope("train", "--dry-run", flag, default.split()[0]).out == plain_run, flag


def test_help_says_what_decides_the_positions(circuitscope):
    assert "learned where no mixer sees the order by itself, else none" in _shown_defaults()["--positions"]
    for model, expected in (("attention", "learned"), ("mamba", "none"), ("rwkv", "none")):
        config = yaml.safe_load(circuitscope("train", "--dry-run", "--model", model).out)
        assert config["model"]["positions"] == expected


def test_train_and_resume_are_those_of_the_api(circuitscope, monkeypatch):
    from circuitscope import api

    called = []
    train, resume = api.train, api.resume
    monkeypatch.setattr(api, "train", lambda *a, **k: called.append("train") or train(*a, **k))
    monkeypatch.setattr(api, "resume", lambda *a, **k: called.append("resume") or resume(*a, **k))
    small = "--length 16 --pairs 2 --vocab-size 16 --d-model 8 --layers 1 --steps 2 --batch-size 8"
    assert circuitscope("train", *small.split(), "--name", "one").code == 0
    assert circuitscope("train", "--resume", "runs/one").code == 0
    assert called == ["train", "resume"]


def test_a_run_a_plot_and_the_same_run_again(circuitscope, tmp_path):
    small = "--length 16 --pairs 2 --vocab-size 16 --d-model 8 --layers 1 --steps 4 --batch-size 8 --save-every 2"
    result = circuitscope("train", *small.split(), "--threads", 1, "--name", "one")
    assert result.code == 0, result.err
    assert "validation accuracy" in result.out
    assert (tmp_path / "runs/one/checkpoints/step-00000004.safetensors").is_file()
    assert circuitscope("train", "runs/one/config.yaml", "--name", "two").code == 0
    first, second = (Run(tmp_path / "runs" / n).load(4).state_dict() for n in ("one", "two"))
    assert all(torch.equal(first[n], second[n]) for n in first)
    again = circuitscope("train", *small.split(), "--name", "one")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "exists already" in again.err
    drawn = circuitscope("plot", "dynamics")
    assert drawn.code == 0
    assert (tmp_path / "runs/two/figures/dynamics.png").is_file()
    assert "runs/two" in drawn.out


# Real processes.


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["tasks", "--help"], ["plot", "--help"], []])
def test_help_imports_nothing_heavy(arguments):
    script = (
        "import sys\n"
        "from circuitscope.cli.main import main\n"
        f"sys.argv = ['circuitscope', *{arguments!r}]\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'transformer_lens', 'pandas', 'matplotlib', 'yaml', 'safetensors'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    loaded = set(re.findall(r"'(\w+)'", done.stdout.split("HEAVY")[1]))
    assert not loaded
    assert "Usage" in done.stdout + done.stderr


@pytest.mark.parametrize("words", ["sweep", "study run"])
def test_help_names_the_program_however_it_was_started(words):
    done = subprocess.run(
        [sys.executable, "-m", "circuitscope", *words.split(), "--help"], capture_output=True, text=True, check=True
    )
    assert f" Usage: circuitscope {words} [OPTIONS]" in plain(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "code"), [("tasks", 0), ("taks", 2)])
def test_the_command_leaves_with_its_code_after_what_is_registered_for_the_end_and_threads_still_at_work(word, code):
    script = (
        "import atexit, sys, threading, time\n"
        "from circuitscope.cli.main import command\n"
        "atexit.register(print, 'registered')\n"
        "if 'wait' in sys.argv:\n"
        "    threading.Thread(target=lambda: (time.sleep(1), print('thread'))).start()\n"
        f"sys.argv = ['circuitscope', {word!r}]\n"
        "command()\n"
    )
    for words in ([], ["wait"]):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert done.stdout.split()[-1] == "registered"
        assert ("thread" in done.stdout.split()) == bool(words)


def test_importing_the_package_imports_nothing_heavy():
    script = "import sys, circuitscope; print({'torch', 'numpy', 'pydantic'} & set(sys.modules), dir(circuitscope)[-1])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("set()"), done


def test_the_installed_program_refuses_bad_input_with_one_line_and_code_2(tmp_path):
    done = subprocess.run(
        [EXECUTABLE, "train", "--dry-run", "--set", "task.pairs=99"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("circuitscope: pairs must be at most")


def test_the_installed_program_stops_quietly_when_its_reader_goes_away(tmp_path):
    command = f"{EXECUTABLE} tasks show mqar --examples 5000 | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout.startswith("mqar")
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["tasks", "tasks show mqar --examples 500", "--help", "train --help", "train --dry-run"]
)
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(tmp_path, words):
    for unbuffered in ("", "1"):
        done = subprocess.run(
            f"PYTHONUNBUFFERED={unbuffered} {EXECUTABLE} {words} > /dev/full",
            shell=True,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (
            1,
            "circuitscope: cannot write the output: No space left on device; apart from that, the command ran to its"
            " end\n",
        )


@pytest.mark.slow
def test_where_nothing_can_be_written_the_exit_code_is_left(tmp_path):
    for words, code in (("tasks", 1), ("taks", 2)):
        done = subprocess.run(
            f"{EXECUTABLE} {words} > /dev/full 2>&1", shell=True, cwd=tmp_path, timeout=120, check=False
        )
        assert done.returncode == code


def test_a_bad_value_is_refused_before_transformer_lens_loads():
    program = """if True:
        import sys
        from circuitscope.cli.main import main
        sys.argv = ["circuitscope", "train", "--set", "model.d_model=nine"]
        try:
            main()
        except SystemExit as end:
            print(end.code, "transformer_lens" in sys.modules, "pandas" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2", "False", "False"]
    assert "model.d_model" in done.stderr


TINY_FLAGS = ("--length", 8, "--pairs", 2, "--vocab-size", 16, "--d-model", 8, "--batch-size", 8, "--threads", 1)


def test_a_run_says_its_recipe_first_and_what_a_bad_end_looks_like_last(circuitscope):
    result = circuitscope(
        "train", "--model", "attention_conv_k", "--steps", "20", "--lr", "1e-9", *TINY_FLAGS, "--name", "bad"
    )
    lines = plain(result.out).splitlines()
    assert result.code == 0
    assert lines[0] == "recipe: attention, untuned for this model"
    assert any(line.startswith("at chance: accuracy ") and "try --lr" in line for line in lines[-4:])
    listed = plain(circuitscope("runs").out).splitlines()
    assert "looks like" in listed[0]
    assert "at chance" in listed[1]
    repeated = plain(circuitscope("train", "runs/bad/config.yaml", "--steps", "2").out).splitlines()
    assert not repeated[0].startswith("recipe")  # the file says everything


def test_fields_show_recipes_and_where_a_default_comes_from(circuitscope):
    assert "train.batch_size" in circuitscope("train", "--fields", "recipe.paper").out
    assert "recipe.zoology:" in circuitscope("train", "--fields", "recipe").out
    assert "default: 0.001, or the recipe's" in circuitscope("train", "--fields", "lr").out


def test_a_recipe_that_does_not_exist_is_one_line(circuitscope):
    result = circuitscope("train", "--recipe", "zology")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "did you mean 'zoology'?" in result.err
