"""studies/CLAIMS.md is what the tables say."""

from pathlib import Path

from circuitscope.studies.study import studies_in
from circuitscope.studies.verdict import claims, verdict

STUDIES = Path(__file__).parents[2] / "studies"


def test_the_page_of_claims_is_made_from_the_tables():
    """If this fails: circuitscope study verdict."""
    found = [verdict(study, scale) for study in studies_in(STUDIES) for scale in ("laptop", "paper")]
    assert (STUDIES / "CLAIMS.md").read_text() == claims(one for one in found if one is not None)
