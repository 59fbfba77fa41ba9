"""Analysis, viz and the command line ask a layer's reading: they never decide by the name of a mixer or a factor."""

import ast
from collections.abc import Iterator
from pathlib import Path

import circuitscope
from circuitscope.mixers import MIXERS

PACKAGE = Path(circuitscope.__file__).parent
NAMES = {*MIXERS.own(), "pattern"}  # a word that once stood for "rows are shares" and for "a head"
ADAPTER = "analysis/reading/opened.py"  # the one file that knows which kind of model it looks at


def sources(*rooms: str) -> dict[str, ast.Module]:
    files = [file for room in rooms for file in (PACKAGE / room).rglob("*.py")]
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text()) for file in files}


def decided_by(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings that code decides by: compared, matched, keys of a mapping, members of a literal collection."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            found = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            found = list(node.keys)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            found = list(node.elts)
        elif isinstance(node, ast.MatchValue):
            found = [node.value]
        for part in found:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value


def asks_for_the_kind_of_model(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            yield from (node.lineno for part in ast.walk(node) if isinstance(part, ast.Name) and part.id == "HookedLM")


def test_nothing_is_decided_by_the_name_of_a_mixer():
    found = {
        f"{file}:{line} decides by '{word}'"
        for file, tree in sources("analysis", "viz", "cli").items()
        for line, word in decided_by(tree)
        if word in NAMES
    }
    assert found == set()


def test_only_the_adapter_asks_which_kind_of_model_it_is():
    found = {
        f"{file}:{line}"
        for file, tree in sources("").items()
        for line in asks_for_the_kind_of_model(tree)
        if file != ADAPTER and not file.startswith("models/")
    }
    assert found == set()


def test_these_tests_see_what_they_look_for():
    tree = ast.parse('a = {"mamba": 1}\nif x == "pattern": pass\ny in ("s4",)\nisinstance(m, (int, HookedLM))\n"mamba"')
    assert {word for _, word in decided_by(tree)} == {"mamba", "pattern", "s4"}
    assert list(asks_for_the_kind_of_model(tree)) == [4]
    assert list(asks_for_the_kind_of_model(sources("analysis/reading")[ADAPTER]))
