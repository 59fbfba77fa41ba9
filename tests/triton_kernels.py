"""The Triton kernels that the package starts, read from its source: a new one is missed where it is not tested."""

import ast
from pathlib import Path

from circuitscope import kernels

FOLDER = Path(kernels.__file__).parent / "triton"


def started(path: Path) -> set[str]:
    """The kernels in a file: functions of Triton that ask which program they are. Others are parts of them."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {
        function.name
        for function in functions
        if any(isinstance(node, ast.Attribute) and node.attr == "program_id" for node in ast.walk(function))
    }


KERNELS = {path.stem: names for path in sorted(FOLDER.glob("*.py")) if (names := started(path))}
