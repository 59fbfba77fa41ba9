"""Is it used? Interventions on a model: knockouts, ablations, patching, and the recall circuit they prove."""
