"""studies/CLAIMS.md is what the tables say, and README says the same in short."""

import re
from pathlib import Path

import pytest

from circuitscope.studies.study import studies_in
from circuitscope.studies.verdict import claims, verdict

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture(scope="module")
def verdicts():
    found = [verdict(study, scale) for study in studies_in(STUDIES) for scale in ("laptop", "paper")]
    return [one for one in found if one is not None]


def test_the_page_of_claims_is_made_from_the_tables(verdicts):
    """If this fails: circuitscope study verdict."""
    assert (STUDIES / "CLAIMS.md").read_text() == claims(verdicts)


def test_readme_lists_every_study_that_was_run_with_its_verdict(verdicts):
    rows = re.findall(
        r"^\| \[(\w+)\]\(studies/\w+\) \|.*\| ([\w ]+) \|$", (STUDIES.parent / "README.md").read_text(), re.M
    )
    run = {one.study.name: one.words for one in verdicts if one.scale == "laptop" and one.words != "not run"}
    assert dict(rows) == run
