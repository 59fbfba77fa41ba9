"""Models whose weights are set by hand, so that the circuit in them is known: they solve MQAR without training.

All work on one-hot tokens. With the same number of ones at every position a layer norm is one fixed
affine map, (x − μ) / σ, which the norm's own weight and bias undo: every branch reads the bare one-hots.
"""

import math

import torch
from torch import Tensor

import circuitscope as cs

VOCAB, LENGTH, PAIRS = 64, 32, 4
SHARP = 40.0  # score of the position a head looks for, above all others


def planted_task(**options) -> cs.tasks.MQAR:
    """MQAR as the planted models solve it: no filler equals a key."""
    return cs.task("mqar", **{"length": LENGTH, "pairs": PAIRS, "vocab_size": VOCAB} | options)


def planted_induction(mimic: bool = False, vocab: int = VOCAB, length: int = LENGTH) -> cs.HookedLM:
    """Two layers of attention, two heads each: the induction circuit in heads 0, idle heads 1.

    The stream has five parts: own token, position, previous token, answer, junk. Head 0 of layer 0 moves
    the token of i − 1 into "previous" (binding); head 0 of layer 1 looks for the position whose previous
    token is its own token and moves that position's token into "answer" (recall), which the unembedding
    reads. The idle heads attend evenly and write tokens into "junk", which nothing reads.

    Args:
        mimic: the idle head of layer 1 has the pattern of the recall head instead: it looks like
            recall, and is not used.
    """
    width = 4 * vocab + length
    token, place, previous, answer, junk = _parts(vocab, length, vocab, vocab, vocab)
    model = cs.model(
        "attention", n_layers=2, n_heads=2, d_model=width, vocab_size=vocab, max_length=length, tied=False,
        state_mixer="none", norm_eps=1e-12,
    )  # fmt: skip
    _clear(model)
    model.embed.weight[:, token] = torch.eye(vocab)
    model.pos_embed[:, place] = torch.eye(length)
    model.unembed.weight[:, answer] = torch.eye(vocab)
    for block, ones in zip(model.layers, (2, 3), strict=True):
        _undo_norm(block.ln1, ones, width)
    model.ln_final.weight.fill_(1)

    binding, recall = _Heads(model.layers[0].mixer), _Heads(model.layers[1].mixer)
    binding.query(0, place, torch.eye(length).roll(1, 0), SHARP)  # position i asks for i − 1
    binding.key(0, place, torch.eye(length))
    binding.move(0, token, previous)
    binding.move(1, token, junk)
    for head in (0, 1) if mimic else (0,):
        recall.query(head, token, torch.eye(vocab), SHARP)
        recall.key(head, previous, torch.eye(vocab))
        recall.never(head, place.start, 2 * SHARP)  # position 0 has no previous token, it reads itself
    recall.move(0, token, answer)
    recall.move(1, token, junk)
    return model.eval()


def planted_conv_mamba(vocab: int = VOCAB) -> cs.HookedLM:
    """One Mamba block that recalls: its conv hands the scan the previous token.

    Half of the channels carry the own token, the others, by a conv that is a shift, the previous one.
    B reads the previous token and C the own one, with A ≈ 0 and Δ = 1, so that Φ_ij of every channel is
    1 where the token before j equals the token at i and else 0: linear attention with one-hot keys. D is
    small, and keeps rows that find nothing from being all rounding. The block adds 4 times what it finds
    to the stream, which holds the own token once.
    """
    own, before = _parts(vocab, vocab)
    model = cs.model(
        "mamba_bare", n_layers=1, d_model=vocab, vocab_size=vocab, d_state=vocab, dt_rank=1, norm_eps=1e-12
    )
    _clear(model)
    mixer = model.layers[0].mixer
    model.embed.weight.copy_(torch.eye(vocab))
    _undo_norm(model.layers[0].ln1, 1, vocab)
    model.ln_final.weight.fill_(1)
    one = 2.0  # of the one-hots inside the block; SiLU keeps 0.88 of it
    kept = float(torch.nn.functional.silu(torch.tensor(one)))
    mixer.in_proj.weight[own], mixer.in_proj.weight[before] = one * torch.eye(vocab), one * torch.eye(vocab)
    mixer.in_proj.weight[2 * vocab :] = one  # the gate: the same for every token
    mixer.conv.weight[own, 0, -1] = 1
    mixer.conv.weight[before, 0, -2] = 1
    ssm = mixer.ssm
    _, B, C = ssm.x_proj.weight.split(ssm.sizes)  # views
    B[:, before], C[:, own] = torch.eye(vocab) / kept, torch.eye(vocab) / kept
    ssm.dt_proj.bias.fill_(float(torch.tensor(1.0).expm1().log()))  # softplus of it is 1
    ssm.A_log.fill_(-20)
    ssm.D.fill_(0.02)
    mixer.out.weight[:, own] = 4 * torch.eye(vocab) / kept**2
    return model.eval()


def planted_late_mamba(vocab: int = VOCAB) -> cs.HookedLM:
    """One Mamba block that recalls from one position after the value: its conv brings key and value together there.

    Channels are in groups: the own token, the token before, the one before that, and idle ones. C reads the own token,
    and B the token two positions back, so that Φ_ij is 1 where that token of j equals the token at i: j is the position
    after the value. The scan reads the token before j there, which is the value.
    """
    width = 2 * vocab
    own, before, earlier, _ = _parts(vocab, vocab, vocab, vocab)
    model = cs.model(
        "mamba_bare", n_layers=1, d_model=width, vocab_size=vocab, d_state=vocab, dt_rank=1, norm_eps=1e-12
    )
    _clear(model)
    mixer = model.layers[0].mixer
    model.embed.weight[:, :vocab] = torch.eye(vocab)
    _undo_norm(model.layers[0].ln1, 1, width)
    model.ln_final.weight.fill_(1)
    one = 2.0
    kept = float(torch.nn.functional.silu(torch.tensor(one)))
    for group, lag in ((own, 0), (before, 1), (earlier, 2)):
        mixer.in_proj.weight[group, :vocab] = one * torch.eye(vocab)
        mixer.conv.weight[group, 0, -1 - lag] = 1
    mixer.in_proj.weight[2 * width :] = one
    ssm = mixer.ssm
    _, B, C = ssm.x_proj.weight.split(ssm.sizes)
    B[:, earlier], C[:, own] = torch.eye(vocab) / kept, torch.eye(vocab) / kept
    ssm.dt_proj.bias.fill_(float(torch.tensor(1.0).expm1().log()))
    ssm.A_log.fill_(-20)
    ssm.D.fill_(0.02)
    mixer.out.weight[:vocab, before] = 4 * torch.eye(vocab) / kept**2
    return model.eval()


def planted_conv_attention(vocab: int = VOCAB) -> cs.HookedLM:
    """One layer of attention that recalls: the conv on its keys is a shift.

    The key of position j is the token at j − 1, so that a query attends to the position after the last occurrence of
    its own token, and moves the token there into "answer", which the unembedding reads.
    """
    width = 2 * vocab
    token, answer = _parts(vocab, vocab)
    model = cs.model(
        "attention_conv_k", n_layers=1, n_heads=1, d_model=width, vocab_size=vocab, tied=False, state_mixer="none",
        positions="none", norm_eps=1e-12,
    )  # fmt: skip
    _clear(model)
    model.embed.weight[:, token] = torch.eye(vocab)
    model.unembed.weight[:, answer] = torch.eye(vocab)
    _undo_norm(model.layers[0].ln1, 1, width)
    model.ln_final.weight.fill_(1)
    mixer = model.layers[0].mixer
    mixer.conv_k.weight[:, 0, -2] = 1
    head = _Heads(mixer)
    head.query(0, token, torch.eye(vocab), SHARP)
    head.key(0, token, torch.eye(vocab))
    head.move(0, token, answer)
    return model.eval()


def planted_conv_q_induction(vocab: int = VOCAB, length: int = LENGTH) -> cs.HookedLM:
    """The induction circuit in two layers of attention; the shift of the first is the conv on its queries.

    The query of position i in layer 0 is position i − 1 by the conv, and a position's key is itself. A query that is
    empty reads its own position, because later positions score a little higher.
    """
    width = 3 * vocab + length
    token, place, previous, answer = _parts(vocab, length, vocab, vocab)
    model = cs.model(
        "attention_conv_q", n_layers=2, n_heads=1, d_model=width, vocab_size=vocab, max_length=length, tied=False,
        state_mixer="none", positions="learned", norm_eps=1e-12,
    )  # fmt: skip
    _clear(model)
    model.embed.weight[:, token] = torch.eye(vocab)
    model.pos_embed[:, place] = torch.eye(length)
    model.unembed.weight[:, answer] = torch.eye(vocab)
    for block, ones in zip(model.layers, (2, 3), strict=True):
        _undo_norm(block.ln1, ones, width)
    model.ln_final.weight.fill_(1)
    model.layers[0].mixer.conv_q.weight[:, 0, -2] = 1
    model.layers[1].mixer.conv_q.weight[:, 0, -1] = 1
    binding, recall = _Heads(model.layers[0].mixer), _Heads(model.layers[1].mixer)
    binding.query(0, place, torch.eye(length), SHARP)
    binding.key(0, place, torch.eye(length))
    for i in range(length):
        binding.never(0, place.start + i, -i * SHARP / 4)
    binding.move(0, token, previous)
    recall.query(0, token, torch.eye(vocab), SHARP)
    recall.key(0, previous, torch.eye(vocab))
    recall.never(0, place.start, 2 * SHARP)  # position 0 has no previous token, it reads itself
    recall.move(0, token, answer)
    return model.eval()


def planted_rwkv(vocab: int = VOCAB) -> cs.HookedLM:
    """One RWKV block that recalls: the shift before its values brings the key to the value.

    Value tokens are the upper half of the vocabulary. Four channels belong to each value token b. Their weights lie on
    the positions that hold b, and what they read there is the token before, as ±cos θ and ±sin θ of its angle. The
    receptance at a query opens the sign that its own angle has: the four together add cos(θ_key − θ_query) to b.
    """
    half, width = vocab // 2, 2 * vocab
    token, answer = _parts(vocab, vocab)
    model = cs.model(
        "rwkv", n_layers=1, d_model=width, vocab_size=vocab, tied=False, state_mixer="none", positions="none",
        norm_eps=1e-12,
    )  # fmt: skip
    _clear(model)
    model.embed.weight[:, token] = torch.eye(vocab)
    model.unembed.weight[:, answer] = torch.eye(vocab)
    _undo_norm(model.layers[0].ln1, 1, width)
    model.ln_final.weight.fill_(1)
    angle = 2 * math.pi * torch.arange(vocab) / vocab
    signs = torch.stack([angle.cos(), -angle.cos(), angle.sin(), -angle.sin()])
    mixer = model.layers[0].mixer
    mixer.time_decay.fill_(-20)
    mixer.time_mix_k.fill_(1)
    mixer.time_mix_r.fill_(1)  # time_mix_v stays 0: values read the token before
    channels = torch.arange(width).reshape(half, 4)
    for value, four in enumerate(channels):
        mixer.key.weight[four, half + value] = SHARP
        mixer.value.weight[four, token] = signs
        mixer.receptance.weight[four, token] = (0.5 + 0.4 * signs).logit()
        mixer.out.weight[answer.start + half + value, four] = 1
    return model.eval()


def _parts(*sizes: int) -> list[slice]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _clear(model: cs.HookedLM) -> None:
    """All parameters zero; no gradients from here on."""
    for parameter in model.parameters():
        parameter.requires_grad_(False).zero_()


def _undo_norm(norm: torch.nn.LayerNorm, ones: int, width: int) -> None:
    """Of a vector with so many ones and else zeros the norm gives back the vector."""
    mean = ones / width
    norm.weight.fill_((mean - mean**2) ** 0.5)
    norm.bias.fill_(mean)


class _Heads:
    """Sets the weights of an attention layer head by head, on parts of the stream."""

    def __init__(self, mixer: cs.mixers.attention.Attention):
        self.d_head, self.n_heads, self.mixer = mixer.d_head, mixer.n_heads, mixer

    def query(self, head: int, part: slice, map: Tensor, scale: float) -> None:
        """q of the part is its row of `map`, times `scale` (and √d, which attention divides by)."""
        self._rows(0, head, map.shape[1])[:, part] = map.T * scale * self.d_head**0.5

    def key(self, head: int, part: slice, map: Tensor) -> None:
        """k of the part is its row of `map`."""
        self._rows(1, head, map.shape[1])[:, part] = map.T

    def never(self, head: int, channel: int, by: float) -> None:
        """Lowers the score of the positions where this channel of the stream is 1."""
        start = head * self.d_head
        self.mixer.qkv.bias[start + self.d_head - 1] = self.d_head**0.5
        self.mixer.qkv.weight[(self.n_heads * self.d_head) + start + self.d_head - 1, channel] = -by

    def move(self, head: int, read: slice, write: slice) -> None:
        """The head moves one part of the stream into another, from where it looks."""
        size = read.stop - read.start
        self._rows(2, head, size)[:, read] = torch.eye(size)
        self.mixer.out.weight[write, head * self.d_head : head * self.d_head + size] = torch.eye(size)

    def _rows(self, which: int, head: int, count: int) -> Tensor:
        start = (which * self.n_heads + head) * self.d_head
        return self.mixer.qkv.weight[start : start + count]
