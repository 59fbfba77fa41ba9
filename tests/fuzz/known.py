"""Groups of findings that are known and accepted: a pattern for the group's name, and why.

A walk counts them apart and does not fail because of them.
"""

KNOWN: dict[str, str] = {
    r"^call: TooLong in analysis/checkpoints/in_order\.py:": "a million sequences take their time",
    r"^call: TooLong in analysis/probes/targets\.py:": "a million sequences take their time",
}
