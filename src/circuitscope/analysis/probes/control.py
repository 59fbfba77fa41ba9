"""Whether a probe reads more than its control, which learns labels that were shuffled by token."""

import pandas as pd


def no_better(frame: pd.DataFrame) -> "pd.Series[bool]":
    """For each row, whether the control reaches into the probe's 95% interval or above it.

    Such a probe tells nothing of what the model represents: labels that mean nothing are read as well. False where no
    control was fitted.
    """
    return (frame["control"] >= frame["low"]).fillna(False).astype(bool)
