"""Groups of findings that are known and not repaired yet: a pattern for the group's name, and what it is.

A walk counts them apart and does not fail because of them. Take an entry out with its repair.
"""

KNOWN: dict[str, str] = {
    r" in runs/(metrics|store|run|checkpoints)\.py:": "damaged files in the folder of a run",
    r"^command: (Key|Type|Value)Error in viz/dynamics\.py:": "metrics lines with other fields than the trainer writes",
    r"^command: control characters in a message": "names with escapes are printed as they are",
    r"^command: ValueError in (cli/plot|analysis/checkpoints/steps)\.py:": "numbers of thousands of digits in lists",
    r"(MemoryError|RuntimeError|TooLong) in (tasks|training|models|mixers|kernels)/": "huge counts, too little memory",
    r"^command: .* in zoom\.py:": "zoom --every 0",
    r"^call: (Value|Index|Runtime)Error in (analysis/(decay|reading)|models)/": "tokens of other shapes and types",
    r"^call with another type: ": "an argument of another type raises errors of Python's or torch's own",
}
