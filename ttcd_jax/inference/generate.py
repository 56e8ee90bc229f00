"""Generation of text after prompts: a batch of requests, each with its own settings
(docs/generation.md)."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.inference.decode import MemoryMode, head_logits, one_token
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.prefill import check_capacity, newest_hidden, stream
from ttcd_jax.inference.sampling import Sampler, SamplingConfig, batch_sampler, sample
from ttcd_jax.inference.state import InferenceState, frozen, start_state
from ttcd_jax.inference.text import TextStream
from ttcd_jax.methods.registry import Settings
from ttcd_jax.sharding.rules import constrain
from ttcd_jax.tokens import check_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt, tokens [T], and where generation ends: at one of the `stop` strings (also names of
    special tokens), one of the `stop_tokens` (None: the tokenizer's eos), or after `max_new_tokens`
    tokens. `begins_with_bos`: whether bos comes before a prompt that begins a document (None: as
    the tokenizer's checkpoint does)."""

    tokens: Sequence[int] | np.ndarray
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] | None = None
    begins_with_bos: bool | None = None

    def __post_init__(self) -> None:
        if np.ndim(self.tokens) != 1:
            raise UserError(f"a prompt is one row of tokens [T], not {np.shape(self.tokens)}")
        if not isinstance(self.sampling, SamplingConfig):
            raise UserError(f"sampling is a SamplingConfig, not {self.sampling!r:.60}")
        if not isinstance(self.max_new_tokens, int | np.integer):
            raise UserError(f"max_new_tokens {self.max_new_tokens!r:.40} is no whole number")
        ends = self.stop_tokens
        if ends is not None and not (
            isinstance(ends, Sequence) and all(isinstance(x, int | np.integer) for x in ends)
        ):
            raise UserError(f"stop_tokens are tokens, not {ends!r:.60}: pass a tuple of them")
        if self.max_new_tokens < 0:
            raise UserError(f"max_new_tokens must be 0 (read only) or more: {self.max_new_tokens}")
        if isinstance(self.stop, str):
            raise UserError(f"stop={self.stop!r} would be its letters: pass ({self.stop!r},)")
        if "" in self.stop:
            raise UserError("a stop string is empty: leave it out")


class Event(NamedTuple):
    """The next token of one row. `text` is the part of the row's text that became certain with it,
    often empty; concatenated they are the generated text, up to a stop string. The last event of a
    row has a `finish_reason`: a stop string, a stop token ("eos"), or max_new_tokens ("length")."""

    row: int
    text: str
    token: int | None  # None: the prompt was only read
    finish_reason: Literal["stop", "eos", "length"] | None


class Generation(Iterator[Event]):
    """The events of a batch of requests, one row each, in the order of generation.

    `state` (one row per request; donated: do not use it again) has read the text before the
    prompts; without it each begins a document. A row's text does not depend on the other rows.
    Random draws depend on positions: a prompt with the beginning of a generated text is continued
    as that text. The repetition penalty ignores tokens read before `state`.

    Between events, the attribute `state` has read all tokens of the events so far, but for a stop
    token and one that completes a stop string; the next event donates it. With memory "frozen"
    prompts write the memory, and then the student goes on alone (`inference.state.frozen`).

    Raises `UserError` and `DataError` before anything is read: not one request per row of `state`,
    tokens outside the vocabulary, an empty prompt after a state that has read tokens, more tokens
    than a state of full attention holds.
    """

    def __init__(
        self,
        model: InferenceModel,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        *,
        state: InferenceState | None = None,
        piece_size: int | None = None,
        memory: MemoryMode | Literal["frozen"] = "kept",
    ) -> None:
        self._freezes = memory == "frozen"
        if memory == "frozen":
            (model.config.settings or Settings()).frozen(model.config)  # raises without a student
            memory = "kept"
        if not requests:
            raise UserError("nothing to generate: there is no request")
        prompts = _prompts(model, tokenizer, requests, state)
        lengths = np.array([len(prompt) for prompt in prompts])
        whole = lengths + [request.max_new_tokens for request in requests]
        if state is None:
            max_length = int(whole.max()) if model.config.window is None else None
            state = start_state(model, len(requests), max_length=max_length)
        check_capacity(model.config, state, whole)
        tokens = np.zeros((len(prompts), lengths.max()), np.int32)
        seen = np.zeros((len(prompts), model.config.vocab_size), bool)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            seen[row, prompt] = True
        self.state = state
        self.num_prompt_tokens = int(lengths.sum())
        self.model, self._memory, self._seen = model, memory, jnp.asarray(seen)
        self._pieces = stream(model, state, tokens, lengths, piece_size=piece_size, memory=memory)
        self._sampler = batch_sampler([request.sampling for request in requests])
        self._requests, self._left = requests, [request.max_new_tokens for request in requests]
        ends = tokenizer.eos_id, *tokenizer.stop_ids
        self._ends = [
            {*(ends if x.stop_tokens is None else x.stop_tokens)}
            | {token for text in x.stop if (token := tokenizer.special_id(text)) is not None}
            for x in requests
        ]
        pairs = zip(requests, prompts, strict=True)
        self._texts = [TextStream(tokenizer, x.stop, context=prompt) for x, prompt in pairs]
        dtype = model.config.precision.compute_dtype
        self._hidden = jnp.zeros((len(prompts), model.config.dim), dtype)
        self._events = self._generate()

    def __next__(self) -> Event:
        return next(self._events)

    def read(self) -> Iterator[int]:
        """The number of prompt tokens read after each piece; the first event reads the rest."""
        num_read = 0
        for counts, hidden, state in self._pieces:
            self.state = state
            self._hidden = newest_hidden(hidden, counts, self._hidden)
            self._hidden.block_until_ready()  # bounds the pieces in flight
            num_read += int(counts.sum())
            yield num_read

    def _generate(self) -> Iterator[Event]:
        for _ in self.read():
            pass
        if self._freezes:
            self.model, self.state = frozen(self.model, self.state)
        model, sampler = self.model, self._sampler
        read_only = (row for row, left in enumerate(self._left) if not left)
        yield from (Event(row, "", None, "length") for row in read_only)
        unfinished = [row for row, left in enumerate(self._left) if left]
        if unfinished:
            position = self.state.position
            tokens, self._seen = _first_token(model, self._hidden, sampler, self._seen, position)
        while unfinished:
            drawn = np.asarray(tokens)
            events = [self._event(row, int(drawn[row])) for row in unfinished]
            is_read = np.zeros(len(drawn), bool)
            is_read[[e.row for e in events if e.finish_reason in (None, "length")]] = True
            if is_read.any():  # computed while the caller handles the events
                tokens, self.state, self._seen = next_token(
                    model, self.state, tokens, is_read, sampler, self._seen, self._memory
                )
            unfinished = [event.row for event in events if event.finish_reason is None]
            yield from events

    def _event(self, row: int, token: int) -> Event:
        text = self._texts[row]
        self._left[row] -= 1
        if token in self._ends[row]:
            return Event(row, text.finish(), token, "eos")
        new = text.push(token)
        if text.is_stopped:
            return Event(row, new, token, "stop")
        if not self._left[row]:
            return Event(row, new + text.finish(), token, "length")
        return Event(row, new, token, None)


def _prompts(
    model: InferenceModel,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    state: InferenceState | None,
) -> list[np.ndarray]:
    """The tokens to read, with bos where a document begins with it."""
    position = np.zeros(len(requests), int) if state is None else np.asarray(state.position)
    if len(position) != len(requests):
        raise UserError(
            f"{len(requests)} requests for a state of {len(position)} rows: give one for each row"
        )
    check_tokens([tokenizer.bos_id], model.config.vocab_size)
    prompts = []
    for row, request in enumerate(requests):
        try:
            check_tokens(request.tokens, model.config.vocab_size)
        except DataError as error:
            raise DataError(f"request {row}: {error}") from error
        prompt = np.asarray(request.tokens, np.int64)
        adds = request.begins_with_bos
        adds = tokenizer.adds_bos if adds is None else adds
        if adds and not position[row] and prompt[:1].tolist() != [tokenizer.bos_id]:
            prompt = np.concatenate([[tokenizer.bos_id], prompt])
        if not prompt.size:
            raise UserError(
                f"request {row} is empty and its state has read {position[row]} tokens: give it "
                "at least one token"
            )
        prompts.append(prompt)
    return prompts


@functools.partial(jax.jit, donate_argnames="seen")
def _first_token(
    model: InferenceModel, hidden: jax.Array, sampler: Sampler, seen: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(first token of every row [B], `seen` with the sharding that `next_token` gives it)."""
    seen = constrain(seen, "batch", None)
    return sample(head_logits(model, hidden), sampler, seen, index), seen


@functools.partial(jax.jit, static_argnames="memory", donate_argnames=("state", "seen"))
def next_token(
    model: InferenceModel,
    state: InferenceState,
    tokens: jax.Array,
    is_read: jax.Array,
    sampler: Sampler,
    seen: jax.Array,
    memory: MemoryMode,
) -> tuple[jax.Array, InferenceState, jax.Array]:
    """(next token of every row [B], state, tokens seen) after `tokens` [B], which the rows
    `is_read` [B] read. One program for all settings, compiled once."""
    hidden, state = one_token(model, state, tokens, is_read, memory)
    seen = constrain(seen.at[jnp.arange(len(tokens)), tokens].set(True), "batch", None)
    return sample(head_logits(model, hidden), sampler, seen, state.position), state, seen
