"""GINC: documents of a mixture of hidden Markov models to train on, and prompts of independent examples to test with.

document    t t t t t …           labels: the next token, everywhere
prompt      x y 0 x y 0 … x       label: y at the end alone; 0: the delimiter
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks import hmm
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout
from circuitscope.tasks.measure import Measure
from circuitscope.tasks.ngram import counts_in_context
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, below, stream_key, words
from circuitscope.tasks.token_task import TokenModel, TokenTask

DELIMITER = 0
SHOTS = (0, 1, 2, 4, 8, 16, 32, 64)  # examples in the prompts that are measured
_RESTART = 1e-4  # how likely the posterior takes a step to be that no chain makes, in prompts

Form = Literal["document", "prompt"]


@dataclass(frozen=True, repr=False)
class HiddenLayout(Layout):
    """A layout that also holds the hidden states, and where in which stream its examples stand.

    model         the model of the mixture that made each sequence
    value, slot   the hidden state behind each token
    stream        the key of the stream, from which the prompts that belong to documents are drawn
    number        the number of each example in it
    """

    model: Int[Tensor, " batch"] | None = None
    value: Int[Tensor, "batch pos"] | None = None
    slot: Int[Tensor, "batch pos"] | None = None
    number: Int[Tensor, " batch"] | None = None
    stream: int = 0


@register("ginc")
class GINC(TokenTask):
    """Documents of a mixture of hidden Markov models; tested on prompts of examples from one of them.

    A hidden state is a value and a slot, 10 of each, and shows the token memory[value, slot]; slot 0 shows the
    delimiter, token 0. Values move by 0.9 · I + 0.1 · (a mixture of permutations), the same in all models; slots move
    by a mixture of permutations that each of the 5 models has for itself. All of this is a function of `hmm_seed`.

    A prompt has k examples and the beginning of one more. Its model and its first slot are drawn once; each
    example begins with that slot and a value of its own, walks as the model says, and ends with the delimiter. The
    label is the likeliest next token under the prompt's own model, given the first slot and the tokens of the last
    example. `circuitscope evaluate` gives accuracy and perplexity on documents, and the accuracy on prompts by k.

    The paper gives the vocabulary (100), 0 to 64 examples, examples of 10 tokens and about 10 million training tokens
    (`examples=10000` at length 1024), and leaves the rest to the work that it follows. Taken from the public
    code of that work: 5 models, temperatures, memory, start, and the labels. It differs in that it tests prompts of up
    to 256 examples, cuts its training sequences from documents of 10,240 tokens, and draws from global state; here
    every sequence is the beginning of a document of its own.
    """

    roles = (Role.SEPARATOR, Role.SYMBOL)
    small: ClassVar = {
        "vocab_size": 12,
        "length": 20,
        "values": 3,
        "slots": 4,
        "hmms": 2,
        "example_length": 4,
        "shots": 3,
    }
    recipe: ClassVar = {
        "task.examples": None,
        "task.length": 128,
        "train.lr": 5e-3,
        "train.weight_decay": 0.1,
        "train.schedule": "cosine",
        "train.steps": 500,
        "train.batch_size": 32,
        "train.eval_batches": 2,
        "train.eval_batch_size": 16,
    }

    name: Literal["ginc"] = "ginc"
    vocab_size: Annotated[int, Unit("tokens")] = Field(
        default=100,
        ge=4,
        le=8192,
        description="size of the vocabulary with the delimiter; 50, 100 and 150 are usual",
    )
    length: Annotated[int, Unit("tokens")] = Field(
        default=1024, ge=2, le=2**20, description="length of a document; prompts that are longer are not measured"
    )
    values: Annotated[int, Unit("values")] = Field(default=10, ge=2, le=64, description="values of a hidden state")
    slots: Annotated[int, Unit("slots")] = Field(
        default=10, ge=2, le=64, description="slots of a hidden state, of which the first shows the delimiter"
    )
    hmms: Annotated[int, Unit("models")] = Field(default=5, ge=1, le=1024, description="models in the mixture")
    value_stay: Annotated[float, Unit("probability")] = Field(
        default=0.9, ge=0, lt=1, description="weight of the identity in the moves of values"
    )
    temperature: float = Field(
        default=0.1, ge=0.01, le=1e6, description="of the weights of permutations; smaller: one of them prevails"
    )
    start_temperature: float = Field(
        default=10.0, ge=0.01, le=1e6, description="of the first state; larger: closer to uniform"
    )
    hmm_seed: int = Field(default=0, description="seed of the memory and of all models; the run's seed does not matter")
    form: Form = Field(default="document", description="what batches hold: documents, or prompts with one label each")
    shots: Annotated[int, Unit("examples")] = Field(
        default=64, ge=0, le=2**16, description="complete examples k in a prompt, with form prompt"
    )
    example_length: Annotated[int, Unit("tokens")] = Field(
        default=10, ge=2, le=1024, description="tokens of an example, without the delimiter; 3 to 10 are usual"
    )

    @model_validator(mode="after")
    def _possible(self) -> "GINC":
        if self.form == "prompt" and self.prompt_length(self.shots) > self.length:
            raise UserError(
                f"ginc: expected shots · (example_length + 1) + example_length - 1 <= length = {self.length}, got"
                f" {self.prompt_length(self.shots)} with shots {self.shots} and example_length {self.example_length}"
            )
        if self.example_length > self.length + 1:
            raise UserError(
                f"ginc: expected example_length - 1 <= length = {self.length}, got example_length {self.example_length}"
            )
        return self

    def prompt_length(self, shots: int) -> int:
        """The tokens of a prompt with so many complete examples."""
        return shots * (self.example_length + 1) + self.example_length - 1

    @property
    def max_length(self) -> int:
        return self.prompt_length(self.shots) if self.form == "prompt" else self.length

    def sizes(self) -> dict[str, int]:
        return {"shots": self.shots} if self.form == "prompt" else {"length": self.length}

    @property
    def models(self) -> hmm.Models:
        """The mixture."""
        return _models(
            self.hmm_seed,
            self.hmms,
            self.values,
            self.slots,
            self.vocab_size,
            self.value_stay,
            self.temperature,
            self.start_temperature,
        )

    def generate(self, key: int, examples: I64) -> Batch:
        model = below(words(stream_key(key, "model"), examples, 1), self.hmms)[:, 0]
        return self._documents(key, examples, model) if self.form == "document" else self._prompts(key, examples, model)

    def _documents(self, key: int, examples: I64, model: I64) -> Batch:
        first = self.models.first(key, examples, model)
        values, slots = self.models.sample(key, examples, model, self.length + 1, *first)
        tokens = self.models.memory[values, slots]
        return self._batch(key, examples, model, tokens[:, :-1], tokens[:, 1:], values[:, :-1], slots[:, :-1])

    def _prompts(self, key: int, examples: I64, model: I64) -> Batch:
        n, k, size = len(examples), self.shots, self.example_length
        slot = 1 + below(words(stream_key(key, "slot"), examples, 1), self.slots - 1)[:, 0]
        value = below(words(stream_key(key, "value"), examples, k + 1), self.values)
        numbers = (examples[:, None] * (k + 1) + np.arange(k + 1)).ravel()  # of all examples of all prompts
        several = [np.repeat(x, k + 1) for x in (model, slot)]
        walks = self.models.sample(key, numbers, several[0], size, value.ravel(), several[1])
        values, slots = (x.reshape(n, k + 1, size) for x in walks)
        values = np.concatenate([values, values[:, :, -1:]], axis=2).reshape(n, -1)[:, : self.max_length]
        slots = np.concatenate([slots, np.zeros((n, k + 1, 1), np.int64)], axis=2).reshape(n, -1)[:, : self.max_length]
        tokens = self.models.memory[values, slots]
        labels = np.full_like(tokens, NO_LABEL)
        labels[:, -1] = self.continuation(model, slot, tokens[:, self.max_length - size + 1 :]).argmax(axis=1)
        batch = self._batch(key, examples, model, tokens, labels, values, slots)
        batch.layout.roles[:, -1] = int(Role.QUERY)
        return batch

    def continuation(self, model: I64, slot: I64, tokens: I64) -> hmm.F64:
        """The distribution of the token behind some tokens [example, token], given the model and the first slot."""
        belief = np.zeros((len(model), self.hmms, self.values, self.slots))
        belief[np.arange(len(model)), model, :, slot] = 1 / self.values
        for belief in self.models.forward(tokens, belief):  # noqa: B007, B020
            pass
        return self.models.shown(belief)

    def _batch(self, key: int, examples: I64, model: I64, tokens: I64, labels: I64, values: I64, slots: I64) -> Batch:
        roles = np.where(slots == 0, Role.SEPARATOR, Role.SYMBOL).astype(np.int8)
        layout = HiddenLayout(
            torch.from_numpy(roles),
            model=torch.from_numpy(model),
            value=torch.from_numpy(np.ascontiguousarray(values)),
            slot=torch.from_numpy(np.ascontiguousarray(slots)),
            number=torch.from_numpy(examples),
            stream=key,
        )
        said, asked = (torch.from_numpy(np.ascontiguousarray(x)) for x in (tokens, labels))
        return Batch(said, asked, layout)

    def measures(self, model: TokenModel, batch: Batch) -> dict[str, Measure]:
        """Loss and accuracy at the labels; for documents also the accuracy on prompts, by the number of examples."""
        found, layout = super().measures(model, batch), batch.layout
        if self.form == "document" and isinstance(layout, HiddenLayout) and layout.number is not None:
            for shots in self.measured_shots:
                prompts = self.prompts(shots).generate(stream_key(layout.stream, "prompts"), layout.number.numpy())
                name = f"accuracy after {shots} examples" if shots != 1 else "accuracy after 1 example"
                found[name] = super().measures(model, prompts)[self.metric]
        return found

    @property
    def measured_shots(self) -> tuple[int, ...]:
        """How many examples the prompts have that are measured: those that are no longer than a document."""
        return tuple(shots for shots in SHOTS if self.prompt_length(shots) <= self.length)

    def prompts(self, shots: int) -> "GINC":
        """The task of prompts with so many examples of the same mixture."""
        return self.model_copy(update={"form": "prompt", "shots": shots})

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {
            "posterior over the mixture": self._posterior,
            "bigrams of the mixture": self._bigrams,
            "3-gram with back-off, in context": self._ngram,
        }

    def _posterior(self, batch: Batch) -> Float[Tensor, " label"]:
        """The likeliest next token given all tokens so far, with every model equally likely at first."""
        tokens, labels = batch.tokens.cpu().numpy(), batch.labels.cpu().numpy()
        belief = np.repeat(self.models.start[None] / self.hmms, len(tokens), axis=0)
        restart = _RESTART if self.form == "prompt" else 0.0
        answers = [self.models.shown(after).argmax(axis=1) for after in self.models.forward(tokens, belief, restart)]
        right = np.stack(answers, axis=1) == labels
        return torch.from_numpy(right[labels != NO_LABEL]).float()

    def _bigrams(self, batch: Batch) -> Float[Tensor, " label"]:
        """The likeliest token behind the last one, where every model and state is equally likely before."""
        every = np.full(
            (self.vocab_size, self.hmms, self.values, self.slots), 1 / (self.hmms * self.values * self.slots)
        )
        shown = np.isin(np.arange(self.vocab_size), self.models.memory)
        answer = np.zeros(self.vocab_size, dtype=np.int64)
        after = next(self.models.forward(np.flatnonzero(shown)[:, None], every[shown]))
        answer[shown] = self.models.shown(after).argmax(axis=1)
        where, target = batch.labelled()
        return (torch.from_numpy(answer)[batch.tokens.reshape(-1)[where].cpu()] == target.cpu()).float()

    def _ngram(self, batch: Batch) -> Float[Tensor, " label"]:
        """What followed the last two tokens most often in the sequence; in a prompt too, every token counts as seen."""
        whole = torch.full_like(batch.tokens, NO_LABEL)
        whole[:, :-1] = batch.tokens[:, 1:]
        there = batch.labels != NO_LABEL
        whole[there] = batch.labels[there]
        counts = counts_in_context(Batch(batch.tokens, whole, batch.layout), 3, self.vocab_size)
        wanted = there[whole != NO_LABEL]
        return (counts.argmax(dim=1)[wanted] == batch.labelled()[1]).float()

    def remarks(self, batch: Batch, row: int) -> list[str]:
        layout = batch.layout
        assert isinstance(layout, HiddenLayout)
        assert layout.model is not None
        assert layout.value is not None
        assert layout.slot is not None
        width = len(str(int(max(batch.tokens.max(), batch.labels.max())))) + 1
        hidden = [("values", layout.value), ("slots ", layout.slot)]
        lines = [name + "".join(f"{int(x):>{width}}" for x in states[row]) for name, states in hidden]
        memory = [f"value {i}: {' '.join(map(str, tokens))}" for i, tokens in enumerate(self.models.memory.tolist())]
        return [*lines, f"model {int(layout.model[row])}; tokens by slot, {'; '.join(memory)}"]


_models = lru_cache(maxsize=4)(
    lambda seed, count, values, slots, vocab, stay, temperature, start: hmm.models(
        seed, count, values, slots, vocab, stay=stay, temperature=temperature, start=start
    )
)
