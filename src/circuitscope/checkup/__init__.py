"""The checkup of a machine: kernels against their references, a run that is killed and resumed, and a few speeds."""
