"""A model that scores token rows and writes texts, for every evaluation.

Requests are sorted by length, the longest first, and computed in batches of similar length and few
shapes. Long rows are streamed through `inference.prefill` in pieces, so that a row of any length
takes the same memory. Answers are in the order of the requests.

Short rows are read in one forward pass, and all where inference has no state (rows cut along `seq`,
several processes, a model that reads ahead); any split of a row gives the same scores.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import UserError
from ttcd_jax.inference.advance import head_weight
from ttcd_jax.inference.generate import Generation, Request
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.inference.prefill import stream
from ttcd_jax.inference.state import InferenceState, abstract_state, start_state, state_axes
from ttcd_jax.measure.journal import Answer, Journal, RowProgress
from ttcd_jax.models.config import TransformerConfig, memory_chunk
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.sharding import rules
from ttcd_jax.sharding.batch import Placement, replicated
from ttcd_jax.tokens import check_tokens
from ttcd_jax.train.loss import token_scores

_LEAST_CAPACITY = 128
# Rows of at most so many tokens are read in one forward pass: one program instead of several, and
# no copy of the parameters.
ONE_PASS = 2048
_LEAST_PASS = 64  # shorter rows are padded to it
# Contexts of short rows are read again for every continuation if these are no more tokens: that is
# faster than compiling programs that keep a state. Padding is no more than `MAX_PADDING` before
# a program for shorter rows is compiled.
MAX_REPEATED, MAX_PADDING = 2**19, 2**17


class Scores(NamedTuple):
    """Arrays [T], or [rows, T]."""

    losses: np.ndarray  # negative log-likelihood of the target, nats
    is_hit: np.ndarray  # whether the target is the likeliest token


class Likelihood(NamedTuple):
    """A continuation of a context."""

    log_likelihood: float  # of all tokens, nats
    is_greedy: bool  # whether each is the likeliest token


def batches(count: int, batch_size: int) -> Iterator[tuple[np.ndarray, int]]:
    """(indices, how many of them count) of `count` rows in batches of one shape: the last is padded
    with its first row."""
    for start in range(0, count, batch_size):
        index = np.arange(start, start + batch_size)
        yield np.where(index < count, index, start), min(batch_size, count - start)


def placed(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Arrays [B, T] of integers as int32, sharded over the mesh in use if there is one."""
    batch = {name: field.astype(np.int32) for name, field in batch.items()}
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return batch
    num_rows, length = batch["tokens"].shape
    placement = Placement(mesh, batch_size=num_rows, length=length)
    return placement({name: field[list(placement.rows)] for name, field in batch.items()})


class Scorer:
    """`model`, on the mesh in use, with at most `batch_size` rows at once. `name` is that of its
    progress, "" for none. Answers in `journal` are not computed again; the same requests give the
    same batches, so an evaluation that goes on gives the same bits. `piece_size` is that of
    `inference.prefill`, for all that is streamed.

    `tokenizer` is needed to generate. Raises `UserError` and `DataError` for tokens outside the
    vocabulary, and for a batch size that does not divide among the devices.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        batch_size: int = 16,
        name: str = "",
        journal: Journal | None = None,
        piece_size: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self._name, self._journal = name, journal
        self._size: Any = {"piece_size": piece_size}

    @functools.cached_property
    def inference(self) -> InferenceModel:
        """The model for inference, a copy of its parameters."""
        return inference_model(self.model)

    def losses(self, rows: Sequence[np.ndarray]) -> list[Scores]:
        """The scores [T] of tokens 1 .. T of every row [T + 1], int, read as it is."""
        rows = [np.asarray(row) for row in rows]
        for row in rows:
            check_tokens(row, self.model.config.vocab_size)
        sizes = [max(len(row) - 1, 0) for row in rows]
        longest = max(sizes, default=0)
        shapes = _pass_sizes([size for size in sizes if size <= ONE_PASS])

        def answers(index: list[int], num_rows: int) -> list[Answer]:
            lengths = _filled([sizes[i] for i in index], num_rows)
            length, is_streamed = longest, self._is_streamed and lengths.max() > ONE_PASS
            if self._is_streamed:
                most = int(lengths.max())
                length = most if is_streamed else min(shape for shape in shapes if shape >= most)
            tokens = _padded([rows[i] for i in index], num_rows, length + 1)
            if is_streamed:
                losses, is_hit = self._streamed(self._state(num_rows, length + 1), tokens, lengths)
            else:
                losses, is_hit = self._in_one_pass(tokens, lengths)
            return [(losses[i, :n], is_hit[i, :n]) for i, n in enumerate(lengths[: len(index)])]

        found = self._answers("losses", sizes, (row.astype(np.int64) for row in rows), answers)
        return [Scores(*answer) for answer in found]

    def loglikelihoods(self, requests: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Likelihood]:
        """The likelihood of every (context, continuation), tokens [C] and [T], each of at least one
        token. Equal contexts are read once, except few short ones."""
        pairs = [(np.asarray(context), np.asarray(rest)) for context, rest in requests]
        if not all(len(context) for context, _ in pairs):
            raise UserError("a context is empty: give it at least one token, bos for example")
        if empty := [index for index, (_, rest) in enumerate(pairs) if not len(rest)]:
            raise UserError(f"continuation {empty[0]} is empty and has no likelihood: leave it out")
        rows = [np.concatenate(pair) for pair in pairs]
        groups: dict[bytes, list[int]] = {}
        for index, (context, _) in enumerate(pairs):
            check_tokens(rows[index], self.model.config.vocab_size)
            groups.setdefault(context.astype(np.int64).tobytes(), []).append(index)
        members = list(groups.values())
        repeated = sum(len(pairs[i][0]) for group in members for i in group[1:])
        is_short = max(map(len, rows), default=0) <= ONE_PASS and repeated <= MAX_REPEATED
        if is_short or not self._is_streamed:
            scores = zip(self.losses(rows), pairs, strict=True)
            return [_likelihood(x[-len(rest) :], y[-len(rest) :]) for (x, y), (_, rest) in scores]
        sizes = [
            len(pairs[group[0]][0]) + sum(len(pairs[i][1]) for i in group) for group in members
        ]

        def answers(index: list[int], num_rows: int) -> list[Answer]:
            """A context is read up to its last token, which begins every continuation."""
            chosen, found = [members[group] for group in index], {}
            contexts = [pairs[group[0]][0] for group in chosen]
            lengths = _filled([len(context) - 1 for context in contexts], num_rows)
            most = max(len(rows[i]) for group in chosen for i in group)
            state, tokens = self._state(num_rows, most), _padded(contexts, num_rows, most)
            for _, _, after in stream(self.inference, state, tokens, lengths, **self._size):
                state = after
            ends = [(g, i, rows[i][lengths[g] :]) for g, group in enumerate(chosen) for i in group]
            ends.sort(key=lambda end: -len(end[2]))
            for part in itertools.batched(ends, num_rows):
                before = _taken(state, _filled([group for group, _, _ in part], num_rows))
                sizes = _filled([len(end) - 1 for _, _, end in part], num_rows)
                tokens = _padded([end for _, _, end in part], num_rows, int(sizes.max()) + 1)
                scores = self._streamed(before, tokens, sizes)
                for row, (_, i, _) in enumerate(part):
                    found[i] = _likelihood(*(field[row, : sizes[row]] for field in scores))
            groups = ([found[i] for i in group] for group in chosen)
            return [tuple(map(np.array, zip(*group, strict=True))) for group in groups]

        content = (array.astype(np.int64) for pair in pairs for array in pair)
        found = self._answers("loglikelihoods", sizes, content, answers)
        results = {
            i: Likelihood(float(value), bool(is_greedy))
            for group, answer in zip(members, found, strict=True)
            for i, value, is_greedy in zip(group, *answer, strict=True)
        }
        return [results[i] for i in range(len(pairs))]

    def generate(self, requests: Sequence[Request]) -> list[str]:
        """The text that follows every prompt. Raises `UserError` without a tokenizer, and where
        inference has no state."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UserError("a run without a tokenizer generates no text: import it with one")
        if jax.process_count() > 1:
            raise UserError(
                f"text is generated in one process, not in {jax.process_count()}: leave "
                "--distributed out"
            )
        sizes = [len(request.tokens) + 1 + request.max_new_tokens for request in requests]
        padding = Request(tokens=[tokenizer.bos_id], max_new_tokens=0)

        def answers(index: list[int], num_rows: int) -> list[Answer]:
            chosen = [requests[i] for i in index] + [padding] * (num_rows - len(index))
            state = self._state(num_rows, max(sizes[i] for i in index))
            texts = [""] * num_rows
            for event in Generation(self.inference, tokenizer, chosen, state=state, **self._size):
                texts[event.row] += event.text
            coded = (json.dumps(text).encode() for text in texts[: len(index)])
            return [(np.frombuffer(text, np.uint8),) for text in coded]

        parts = (
            (np.asarray(x.tokens).tolist(), x.sampling, x.stop, x.stop_tokens) for x in requests
        )
        content = (np.frombuffer(repr(part).encode(), np.uint8) for part in parts)
        limits = [request.max_new_tokens for request in requests]
        found = self._answers("generate", sizes, content, answers, limits)
        return [json.loads(text.tobytes()) for (text,) in found]

    def _answers(
        self,
        kind: str,
        sizes: Sequence[int],
        content: Iterator[np.ndarray],
        answers: Callable[[list[int], int], list[Answer]],
        limits: Sequence[int] = (),
    ) -> list[Answer]:
        """The answers to all requests, computed by `answers(indices, rows of the batch)`. A batch
        has requests of similar `limits` (steps after the batch is read), then of similar size."""
        longest = [*zip(limits or [0] * len(sizes), sizes, strict=True)]
        order = sorted(range(len(sizes)), key=longest.__getitem__, reverse=True)
        plan = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        num_rows = rules.axis_size("data") * rules.axis_size("fsdp")
        while num_rows < len(sizes):  # few shapes: `batch_size`, or fewer in powers of two
            num_rows *= 2
        num_rows, journal, key, found = min(num_rows, self.batch_size), self._journal, "", {}
        if journal is not None:
            parts = [kind, plan, longest, self._size], self.model.config.to_dict(), self.checksum
            key = journal.key(*parts, content=(array.tobytes() for array in content))
            found = journal.read(key)
        work = {
            batch: sum(sizes[i] for i in index)
            for batch, index in enumerate(plan)
            if batch not in found
        }
        num_found = len(sizes) - sum(len(plan[batch]) for batch in work)
        progress = RowProgress(self._name, num_found, len(sizes), sum(work.values()))
        try:
            for batch in work:
                found[batch] = answers(plan[batch], num_rows)
                if journal is not None:
                    journal.add(key, batch, found[batch])
                progress.add(len(plan[batch]), work[batch])
        finally:
            if journal is not None:
                journal.write(key)
            progress.end()
        pairs = (zip(index, found[batch], strict=True) for batch, index in enumerate(plan))
        results = dict(itertools.chain.from_iterable(pairs))
        return [results[i] for i in range(len(sizes))]

    @functools.cached_property
    def _is_streamed(self) -> bool:
        """Whether inference has a state of this model here."""
        is_alone = jax.process_count() == 1 and rules.axis_size("seq") == 1
        return is_alone and not _reads_ahead(self.model.config)

    @functools.cached_property
    def checksum(self) -> list[int]:
        """A checksum of every parameter, the same on any mesh."""
        mesh = jax.sharding.get_mesh()
        return [int(x) for x in jax.tree.leaves(_checksums(mesh, nnx.state(self.model)))]

    def _state(self, num_rows: int, most: int) -> InferenceState:
        """A state for rows of at most `most` tokens; capacities of few values."""
        step = 1 << max((most - 1).bit_length() - 3, 0)
        capacity = max(_LEAST_CAPACITY, -(-most // step) * step)
        max_length = capacity if self.model.config.window is None else None
        return start_state(self.inference, num_rows, max_length=max_length)

    def _streamed(self, state: InferenceState, tokens: np.ndarray, lengths: np.ndarray) -> Scores:
        """The scores [B, T] of rows [B, T + 1] whose first `lengths` targets count; `state` is
        donated."""
        targets, is_double = tokens[:, 1:], jax.config.read("jax_enable_x64")
        losses = np.zeros(targets.shape, np.float64 if is_double else np.float32)
        scores = Scores(losses, np.zeros(targets.shape, bool))
        done, last = np.zeros_like(lengths), []

        def fetch(start: np.ndarray, counts: np.ndarray, part: tuple[jax.Array, ...]) -> None:
            row, offset = np.nonzero(np.arange(part[0].shape[1]) < counts[:, None])
            for field, values in zip(scores, jax.device_get(part), strict=True):
                field[row, start[row] + offset] = values[row, offset]

        pieces = stream(self.inference, state, tokens[:, :-1], lengths, **self._size)
        for counts, hidden, _ in pieces:
            index = np.minimum(done[:, None] + np.arange(hidden.shape[1]), targets.shape[1] - 1)
            part = _piece_scores(self.inference, hidden, np.take_along_axis(targets, index, axis=1))
            if last:
                fetch(*last.pop())  # while the device computes the next piece
            last.append((done, counts, part))
            done = done + counts
        for piece in last:
            fetch(*piece)
        return scores

    def _in_one_pass(self, tokens: np.ndarray, lengths: np.ndarray) -> Scores:
        """`_streamed` from the start, as one forward pass of all processes."""
        unit = rules.axis_size("seq") * (memory_chunk(self.model.config) or 1)
        tokens = np.pad(tokens, ((0, 0), (0, -(tokens.shape[1] - 1) % unit)))
        graph, params = nnx.split(self.model)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        if _reads_ahead(self.model.config):  # padding is another document
            batch["segment_ids"] = np.arange(tokens.shape[1] - 1) < lengths[:, None]
        found = _forward_scores(graph, jax.sharding.get_mesh(), params, placed(batch))
        return Scores(*map(np.array, jax.device_get(found)))


@functools.lru_cache
def _reads_ahead(config: TransformerConfig) -> bool:
    """Whether a model of `config` has no state, as a token's results depend on later tokens."""
    try:
        model = nnx.eval_shape(lambda: inference_model(Transformer(config, rngs=nnx.Rngs(0))))
        abstract_state(model, 1, max_length=1)
    except UserError:
        return True
    return False


def _pass_sizes(sizes: Sequence[int]) -> list[int]:
    """The lengths to which rows of `sizes` are padded, few: the longest, and shorter ones, powers
    of two or 3/4 of them, that spare more than `MAX_PADDING` tokens."""
    found = [max(sizes, default=0)]
    for index, size in enumerate(sorted(sizes, reverse=True)):
        power = 1 << max(size - 1, 0).bit_length()
        shorter = max(power * 3 // 4 if size <= power * 3 // 4 else power, _LEAST_PASS)
        if (found[-1] - shorter) * (len(sizes) - index) > MAX_PADDING:
            found.append(shorter)
    return found


def _filled(values: Sequence[int], num_rows: int) -> np.ndarray:
    """Values of the first of `num_rows` rows [num_rows] int32, the others zero."""
    return np.array([*values, *[0] * (num_rows - len(values))], np.int32)


def _padded(rows: Sequence[np.ndarray], num_rows: int, length: int) -> np.ndarray:
    """The rows as one array [num_rows, length], padded with zeros."""
    tokens = np.zeros((num_rows, length), np.int64)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens


def _likelihood(losses: np.ndarray, is_hit: np.ndarray) -> Likelihood:
    return Likelihood(-float(losses.sum(dtype=np.float64)), bool(is_hit.all()))


@jax.jit
def _piece_scores(
    model: InferenceModel, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> tuple[jax.Array, jax.Array]:
    return token_scores(hidden, head_weight(model), targets)


@jax.jit
def _taken(state: InferenceState, index: Int[Array, " R"]) -> InferenceState:
    """The rows `index` of a state."""
    taken = jax.tree.map(lambda x: x[index], state)
    return jax.tree.map(lambda x, names: rules.constrain(x, *names), taken, state_axes(taken))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward_scores(
    graph: nnx.GraphDef[Transformer], mesh: Mesh, params: nnx.GraphState, batch: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """One program for every evaluation of a model, however often its parameters change."""
    model = nnx.merge(graph, params)
    hidden, _ = model.forward(batch["tokens"], batch.get("segment_ids"))
    scores = token_scores(hidden, model.head_weight(), batch["targets"])
    return scores if mesh.empty else jax.lax.with_sharding_constraint(scores, replicated(mesh))


@functools.partial(jax.jit, static_argnums=0)
def _checksums(mesh: Mesh, params: Any) -> Any:
    """For every array, the sum of its bits times odd numbers, modulo 2^32: sums of integers are
    exact in any order."""

    def checksum(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")
        factors = np.uint32(2654435761) * jnp.arange(bits.size, dtype=jnp.uint32) | 1
        total = jnp.sum(bits.astype(jnp.uint32) * factors.reshape(bits.shape), dtype=jnp.uint32)
        return total if mesh.empty else jax.lax.with_sharding_constraint(total, replicated(mesh))

    return jax.tree.map(checksum, params)
