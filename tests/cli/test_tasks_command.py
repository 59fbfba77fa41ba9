"""`circuitscope tasks` lists what is registered, with whatever it says of itself."""

import pytest
from typer.testing import CliRunner

from circuitscope.cli.tasks import app
from circuitscope.tasks import MQAR, TASKS, register
from registered import added_to


@pytest.mark.parametrize("arguments", [[], ["show", "wordless"]])
def test_a_task_without_a_docstring_is_listed_and_shown(arguments):
    with added_to(TASKS):

        @register("wordless")
        class Wordless(MQAR):
            name: str = "wordless"

        Wordless.__doc__ = None
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "wordless" in result.output
