"""Odd values for every kind of input, and small changes that make a right value nearly right."""

import math
import random
import string
from pathlib import Path
from typing import Any

_NUMBERS = (
    *(0, 1, 2, 3, 7, -1, -7, 10**6, 10**9, 2**31, 2**31 - 1, 2**32, 2**40, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1.5, -0.1, 1e-300, 1e-45, 1e38, 1e300, math.inf, -math.inf, math.nan),
)
_TEXTS = (
    *(
        "",
        " ",
        "  x  ",
        ",",
        ",,",
        ":",
        "::",
        "0:",
        ":5",
        "0:10:0",
        "5:0",
        "-1",
        "+1",
        "1e3",
        "1_000",
        "٣",
        "½",
        "0x10",
        "00",
    ),
    *(
        "all",
        "none",
        "None",
        "null",
        "~",
        "true",
        "False",
        "nan",
        "inf",
        "-inf",
        "auto",
        "*",
        "**",
        "?",
        "[",
        "]",
        "{}",
        "[]",
    ),
    *(
        "a b",
        "a\nb",
        "\n",
        "\t",
        "\r",
        "a\x00b",
        "\x1b[31mred\x1b[0m",
        "\x1b]0;title\x07",
        "\u202eabc",
        "\ud800",
        "é",
        "日本語",
    ),
    *(
        "🙂" * 5,
        "a" * 300,
        "a" * 5000,
        "9" * 5000,
        "%s%d%n",
        "$HOME",
        "${x}",
        "`id`",
        "; true",
        "'",
        '"',
        "\\",
        "-",
        "--",
        "=",
        "@",
    ),
    *(
        ".",
        "..",
        "/",
        "//",
        "./",
        "~/x",
        "/dev/null",
        "/dev/full",
        "/proc/self/mem",
        "/nowhere/at/all",
        "a/b/c",
        "con.png",
    ),
    *(
        "[bold]x",
        "[/]",
        "[red",
        "<b>x</b>",
        "</script>",
        "&amp;",
        "{0}",
        "{x}",
        "!!python/object/apply:os.getcwd []",
        "&a [*a]",
    ),
    *(
        "__class__",
        "__init__",
        "model_config",
        "name",
        "0",
        "1",
        "9223372036854775808",
        "1,2",
        "0,0",
        "a,b",
        "0,",
        "0;1",
        "0-1",
    ),
)


def number(draw: random.Random) -> int | float:
    """A number from the list, or a small or a very large one."""
    how = draw.random()
    if how < 0.7:
        return draw.choice(_NUMBERS)
    return draw.randint(-20, 40) if how < 0.9 else draw.getrandbits(draw.choice((8, 33, 70))) - 5


def text(draw: random.Random) -> str:
    """A text from the list, a number as a text, or random characters."""
    how = draw.random()
    if how < 0.65:
        return draw.choice(_TEXTS)
    if how < 0.85:
        return str(number(draw))
    letters = string.printable + "é\u202e\x00\x1b"
    return "".join(draw.choice(letters) for _ in range(draw.randint(1, 12)))


def argument(draw: random.Random) -> str:
    """A text that can be a word of a command line: the system allows no zero byte there and no lone surrogate."""
    return text(draw).replace("\x00", "0").replace("\ud800", "\udc80")


def plain(draw: random.Random, deep: int = 2) -> Any:
    """A value as JSON or YAML can hold it."""
    how = draw.random()
    if how < 0.35:
        return number(draw)
    if how < 0.65:
        return text(draw)
    if how < 0.75:
        return draw.choice((None, True, False))
    if not deep or how < 0.8:
        return draw.choice(([], {}, [[]], {"": None}))
    if how < 0.9:
        return [plain(draw, deep - 1) for _ in range(draw.randint(1, 4))]
    return {text(draw): plain(draw, deep - 1) for _ in range(draw.randint(1, 3))}


def value(draw: random.Random) -> Any:
    """Any Python value that a user could pass by mistake."""
    import numpy as np
    import torch

    if draw.random() < 0.6:
        return plain(draw)
    return draw.choice(
        (
            *(b"", b"bytes", (), (1, 2), {1, 2}, range(3), slice(0, 2), 1j, Path("nowhere"), Path("")),
            *(object, len, int, Exception("x"), float("nan"), Ellipsis, iter([1, 2])),
            *(np.zeros((2, 3)), np.array(3), np.int64(1), np.float32(0.5), np.array([]), np.array(["a"])),
            *(torch.zeros(2, 16), torch.zeros(2, 16, dtype=torch.long), torch.zeros(0, 16, dtype=torch.long)),
            *(torch.zeros(16, dtype=torch.long), torch.full((2, 16), 10**6), torch.full((2, 16), -1), torch.tensor(1)),
            *(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 99, dtype=torch.long), torch.zeros(1, 1, 16, 16)),
            *(torch.full((1, 1, 16, 16), math.nan), torch.zeros(2, 16, dtype=torch.bool), torch.zeros(2, 16, 3)),
        )
    )


def nearly(draw: random.Random, right: str) -> str:
    """A right text with a slip: a letter left out, doubled, exchanged, in the other case, or something added."""
    if not right:
        return "x"
    at = draw.randrange(len(right))
    letter = right[at]
    return draw.choice(
        (
            right[:at] + right[at + 1 :],
            right[:at] + letter * 2 + right[at + 1 :],
            right[:at] + letter.swapcase() + right[at + 1 :],
            right[:at] + draw.choice(string.ascii_lowercase + "-_.,0") + right[at + 1 :],
            right + draw.choice((" ", ",", "s", "0", ".", "/")),
            " " + right,
            right[::-1],
        )
    )
