"""Errors that a user can act on: one line that says what was wrong, what was expected, and the nearest valid name.

A bug raises an ordinary exception instead, with its traceback.
"""

import difflib
from collections.abc import Iterable


class _OneLine(Exception):
    """An error whose message is one line, whatever names and values it quotes."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class UserError(_OneLine):
    """The input was bad. The command line prints the message as one line and exits with code 2."""


class Busy(UserError):
    """Another process is writing the same files."""


class RunFailed(_OneLine):
    """A run started and could not continue. The command line exits with code 1."""


class Diverged(RunFailed):
    """A loss, a gradient or a weight of a run is not finite."""


class Stopped(_OneLine):
    """Ctrl-C or another signal stopped the work. The command line prints the message and exits with this code."""

    def __init__(self, message: str, exit_code: int = 130):
        super().__init__(message)
        self.exit_code = exit_code


_WORDS = {  # a field of a config, and what it is called elsewhere
    "batch_size": "batch bs",
    "clip": "grad_clip gradient_clip max_grad_norm",
    "d_model": "dim embed_dim hidden_dim hidden_size n_embd width",
    "length": "context_length max_len max_seq_len n_ctx seq_len seq_length sequence_length",
    "lr": "learning_rate",
    "n_heads": "heads n_head num_heads",
    "n_layers": "layers n_layer num_layers",
    "pairs": "kv_pairs n_pairs num_kv_pairs",
    "precision": "dtype",
    "schedule": "lr_schedule lr_scheduler scheduler",
    "seed": "random_seed",
    "steps": "epochs iterations iters max_steps n_epochs n_steps num_epochs num_steps",
    "vocab_size": "d_vocab n_vocab vocab",
    "warmup": "warmup_ratio",
    "weight_decay": "decay l2 wd",
}
_MEANS = {word: field for field, words in _WORDS.items() for word in words.split()}


def unknown(kind: str, name: object, valid: Iterable[str], elsewhere: Iterable[str] = ()) -> UserError:
    """`unknown task 'mqra'; did you mean 'mqar'? valid: ar, induction, mqar`.

    Args:
        elsewhere: names that are valid in other places, to be suggested but not listed.
    """
    names = sorted(valid)
    if not names and not elsewhere:
        return UserError(f"unknown {kind} {shown(name)}; there is none")
    meant = _meant(str(name), [*names, *elsewhere])
    close = [meant] if meant else difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return UserError(f"unknown {kind} {shown(name)}; {hint}valid: {', '.join(names)}")


def _meant(name: str, valid: list[str]) -> str | None:
    """A valid name that ends in the same word as a dotted name or, if there is none, in a word of the same meaning.

    "hook_phi" is a word of the same meaning as "phi".
    """
    last = name.rpartition(".")[2]
    for word in (last, f"hook_{last}", _MEANS.get(last.lower())):
        found = [v for v in valid if v.rpartition(".")[2] == word]
        if found:
            return difflib.get_close_matches(name, found, n=1, cutoff=0)[0]
    return None


def described(value: object) -> str:
    """What a value is, in a few words: `Tensor of shape [4, 16] and type int64`, or its repr."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return shown(value)
    return f"{type(value).__name__} of shape {list(shape)} and type {str(getattr(value, 'dtype', '')).split('.')[-1]}"


def escaped(text: object) -> str:
    """A text without the characters that a terminal acts on: a newline in a name becomes \\n, an escape \\x1b.

    Names of runs, paths and the values of a config may come from anywhere. Whatever is printed goes through here.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shown(value: object, most: int = 80) -> str:
    """A value as one short line."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"
