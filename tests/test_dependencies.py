"""Dependencies point one way, and reading a config costs no more than it must."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import circuitscope

PACKAGE = Path(circuitscope.__file__).parent
FLOORS = [  # a room imports from the floors below its own
    {"__main__"},
    {"cli"},
    {"studies"},
    {"sweeps", "api", "zoom", "checkup"},
    {"viz", "analysis", "training"},
    {"runs"},
    {"config"},
    {"models", "tasks"},
    {"mixers"},
    {"kernels"},
    {"errors", "arguments", "explain", "section", "registry", "memory", "progress", "hooks", "lens", "devices"},
]
SIDEWAYS = {("viz", "analysis")}
GROUND = FLOORS[-1]
LENS = {"lens"}


def modules(path: Path) -> Iterator[str]:
    """Full names of what a file imports: at its top, in functions, for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows() -> dict[tuple[str, str], list[str]]:
    """(room, room it imports) → the files that do; the package's own lazy __init__ belongs to no room."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in {m for m in modules(path) if room != "__init__"}:
            top, _, rest = name.partition(".")
            target = rest.split(".")[0] if top == "circuitscope" else top if top == "transformer_lens" else room
            if target not in (room, "", "__version__"):
                found.setdefault((room, target), []).append(str(path.relative_to(PACKAGE)))
    return found


def allowed(room: str, target: str) -> bool:
    if target == "transformer_lens":
        return room in LENS
    if room == "tasks" or room in GROUND:
        return target in GROUND or (room, target) == ("tasks", "kernels")  # a task computes its own loss
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    return floor[room] < floor[target] or (room, target) in SIDEWAYS


def test_every_file_and_folder_of_the_package_has_a_floor():
    rooms = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if not p.name.startswith("_")}
    assert rooms <= set().union(*FLOORS)


def test_no_arrow_points_back():
    found = arrows()
    graph = "\n".join(
        f"{room} → {', '.join(sorted(t for r, t in found if r == room))}" for room in sorted({r for r, _ in found})
    )
    back = [
        f"{room} → {target}: {', '.join(files)}" for (room, target), files in found.items() if not allowed(room, target)
    ]
    assert not back, "arrows that point back:\n" + "\n".join(back) + "\n\nthe rooms:\n" + graph


def test_one_module_imports_transformer_lens():
    assert len({room for room, target in arrows() if target == "transformer_lens"}) == 1


REFUSES = """
import sys
from circuitscope.config import RunConfig
from circuitscope.errors import UserError
import circuitscope.runs.run
try:
    RunConfig.parse({"model": "mamba", "train": {"lr": "fast"}})
except UserError as error:
    print(error)
print(*{"transformer_lens", "pandas", "matplotlib", "sklearn"} & set(sys.modules))
"""


def test_a_config_is_read_and_refused_without_anything_heavy():
    done = subprocess.run([sys.executable, "-c", REFUSES], capture_output=True, text=True, check=True)
    line, heavy = done.stdout.splitlines()
    assert line.startswith("train.lr: expected a number")
    assert heavy == ""
