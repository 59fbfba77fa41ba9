"""Interventions that show what a model uses: knockouts, ablations, patching, and the recall circuit they prove."""
