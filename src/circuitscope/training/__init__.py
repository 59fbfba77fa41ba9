"""Training: the loop, the optimizer and its schedule, the device, trackers, and the repetition of a run."""
