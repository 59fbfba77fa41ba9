"""When things happen: transitions in curves, the evidence for them, and the order of events in a run."""
