"""Things by name: ours, those that a decorator adds, and those that an installed package brings by an entry point."""

import sys
import textwrap

import pytest

from circuitscope.analysis.registry import ANALYSES
from circuitscope.analysis.scores.registry import SCORES
from circuitscope.errors import UserError
from circuitscope.mixers import MIXERS
from circuitscope.registry import Registry

REGISTRIES = {"mixers": MIXERS, "scores": SCORES, "analyses": ANALYSES}


class Installed:
    """Packages in a temporary folder that importlib.metadata finds as if they were installed."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        monkeypatch.syspath_prepend(str(folder))

    def __call__(self, package: str, group: str, source: str, *, point: str = "toy") -> None:
        module = package.replace("-", "_")
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{point} = {module}\n")
        self.monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    return Installed(tmp_path, monkeypatch)


@pytest.fixture
def anew(monkeypatch):
    """A registry that has not looked for entry points yet; what it is given is gone after the test."""

    def forget(registry: Registry) -> Registry:
        list(registry)  # our own are there
        monkeypatch.setattr(registry, "_things", dict(registry._things))
        monkeypatch.setattr(registry, "_from", dict(registry._from))
        monkeypatch.setattr(registry, "_loaded", False)
        return registry

    return forget


@pytest.fixture
def toys() -> Registry[str]:
    found: Registry[str] = Registry("toy", "toys")
    found.add("ball", "round", "circuitscope.toys")
    return found


BRINGS_A_KITE = """
    import sys
    sys.modules["test_registry_toys"].add("kite", "flat", __name__)
"""


@pytest.fixture
def reachable(toys, monkeypatch):
    """Packages find the registry of toys under this module's name."""
    monkeypatch.setitem(sys.modules, "test_registry_toys", toys)
    return toys


def test_a_name_that_is_not_known_gives_the_nearest(toys):
    with pytest.raises(UserError, match="unknown toy 'bal'; did you mean 'ball'"):
        toys["bal"]
    assert "bal" not in toys
    assert toys.get("ball") == "round"


def test_a_decorator_registers_and_returns_the_thing_itself(toys):
    @toys.register("top")
    class Top:
        pass

    assert toys["top"] is Top
    assert (list(toys), toys.own()) == (["ball", "top"], ["ball"])


def test_an_entry_point_is_loaded_when_a_name_is_first_looked_up_and_once(reachable, install):
    install("toy-kite", "circuitscope.toys", BRINGS_A_KITE)
    assert "toy_kite" not in sys.modules
    assert list(reachable) == ["ball", "kite"]
    assert reachable.own() == ["ball"]
    del sys.modules["toy_kite"]
    assert len(reachable) == 2
    assert "toy_kite" not in sys.modules


def test_entry_points_of_other_groups_are_left_alone(reachable, install):
    install("toy-kite", "circuitscope.games", BRINGS_A_KITE)
    assert list(reachable) == ["ball"]


def test_an_outside_name_may_not_shadow_ours(reachable, install):
    install("toy-ball", "circuitscope.toys", BRINGS_A_KITE.replace("kite", "ball"))
    with pytest.raises(
        UserError, match=r"^toy_ball cannot register the toy 'ball': that name is circuitscope's own; choose another$"
    ):
        reachable["ball"]


def test_nor_may_two_packages_have_one_name_and_one_may_register_its_own_again(toys):
    toys.add("kite", "flat", "first")
    toys.add("kite", "flatter", "first")
    assert toys["kite"] == "flatter"
    with pytest.raises(UserError, match="second cannot register the toy 'kite': that name is registered by first"):
        toys.add("kite", "flat", "second")


@pytest.mark.parametrize("name", ["", "../kite", "a kite", ".kite"])
def test_a_name_is_fit_for_the_name_of_a_file(toys, name):
    with pytest.raises(UserError, match=r"first cannot register the toy .*: a name has letters, digits"):
        toys.add(name, "flat", "first")


def test_a_package_that_ends_the_program_when_it_is_loaded_is_named(reachable, install):
    install("toy-exit", "circuitscope.toys", "raise SystemExit(0)")
    with pytest.raises(UserError, match="toy-exit, which provides the toy 'toy', cannot be loaded: SystemExit"):
        list(reachable)


def test_a_package_that_cannot_be_loaded_is_named(reachable, install):
    install("toy-broken", "circuitscope.toys", "import a_module_that_is_nowhere")
    with pytest.raises(
        UserError,
        match=r"the installed package toy-broken, which provides the toy 'toy', cannot be loaded: ModuleNotFound",
    ) as error:
        list(reachable)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="cannot be loaded"):  # and named again, not forgotten
        list(reachable)


# -- the registries of this package -------------------------------------------------------------------

ADDS = {
    "mixers": """
        from typing import Literal
        from circuitscope.mixers import register
        from circuitscope.mixers.lstm import LSTM, LSTMConfig
        class Config(LSTMConfig):
            name: Literal["NAME"] = "NAME"
        @register(Config)
        class Outside(LSTM):
            pass
    """,
    "scores": """
        from circuitscope.analysis import edge_score, named_edges
        @edge_score("NAME", "on the position before")
        def edges(layout):
            return named_edges("previous_token", layout)
    """,
    "analyses": """
        from circuitscope.analysis import analysis
        @analysis("NAME", "One number.", {"value": "float64"})
        def rows(model, data):
            yield {"value": 1.0}
    """,
}
OURS = {"mixers": "mamba", "scores": "recall", "analyses": "decay"}


@pytest.mark.parametrize("which", REGISTRIES)
def test_an_installed_package_adds_to_each_of_our_registries(which, install, anew):
    import circuitscope.analysis.checkpoints.runner  # noqa: F401  brings our own analyses

    registry = anew(REGISTRIES[which])
    before = list(registry._things)
    install(f"toy-{which}", f"circuitscope.{which}", ADDS[which].replace("NAME", "outside"))
    assert list(registry) == [*before, "outside"]
    assert "outside" not in registry.own()


@pytest.mark.parametrize("which", REGISTRIES)
def test_and_may_not_take_the_name_of_one_of_ours(which, install, anew):
    import circuitscope.analysis.checkpoints.runner  # noqa: F401

    registry = anew(REGISTRIES[which])
    ours = registry._things[OURS[which]]
    install(f"shadow-{which}", f"circuitscope.{which}", ADDS[which].replace("NAME", OURS[which]))
    with pytest.raises(UserError, match=rf"'{OURS[which]}': that name is circuitscope's own; choose another"):
        list(registry)
    assert registry._things[OURS[which]] is ours


def test_a_mixer_from_outside_is_built_by_name(install, anew):
    import torch

    import circuitscope as cs

    anew(MIXERS)
    install("toy-mixers", "circuitscope.mixers", ADDS["mixers"].replace("NAME", "outside"))
    model = cs.HookedLM(cs.models.ModelConfig(mixers=("outside",), n_layers=1, d_model=8, vocab_size=9))
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 9)
    assert type(model.layers[0].mixer).__module__ == "toy_mixers"
