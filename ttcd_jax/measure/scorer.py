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
from ttcd_jax.inference.prefill import newest_hidden, stream
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
            lengths = np.zeros(num_rows, np.int32)
            lengths[: len(index)] = [sizes[i] for i in index]
            length, read = longest, self._in_one_pass
            if self._is_streamed:
                length = int(lengths.max())
                if length > ONE_PASS:
                    read = self._streamed
                else:
                    length = min(shape for shape in shapes if shape >= length)
            tokens = _padded([rows[i] for i in index], num_rows, length + 1)
            losses, is_hit = read(tokens, lengths)
            return [(losses[i, :n], is_hit[i, :n]) for i, n in enumerate(lengths[: len(index)])]

        found = self._answers("losses", sizes, (row.astype(np.int64) for row in rows), answers)
        return [Scores(*answer) for answer in found]

    def loglikelihoods(self, requests: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Likelihood]:
        """The likelihood of every (context, continuation), tokens [C] and [T], each of at least one
        token. Equal contexts are read once, except few short ones."""
        pairs = [(np.asarray(context), np.asarray(rest)) for context, rest in requests]
        for tokens in itertools.chain(*pairs):
            check_tokens(tokens, self.model.config.vocab_size)
        if not all(len(context) for context, _ in pairs):
            raise UserError("a context is empty: give it at least one token, bos for example")
        if empty := [index for index, (_, rest) in enumerate(pairs) if not len(rest)]:
            raise UserError(f"continuation {empty[0]} is empty and has no likelihood: leave it out")
        groups: dict[bytes, list[int]] = {}
        for index, (context, _) in enumerate(pairs):
            groups.setdefault(context.astype(np.int64).tobytes(), []).append(index)
        members = list(groups.values())
        rows = [np.concatenate(pair) for pair in pairs]
        repeated = sum(len(pairs[i][0]) for group in members for i in group[1:])
        is_short = max(map(len, rows), default=0) <= ONE_PASS and repeated <= MAX_REPEATED
        if is_short or not self._is_streamed:
            ends = [slice(len(context) - 1, None) for context, _ in pairs]
            scores = zip(self.losses(rows), ends, strict=True)
            return [_likelihood(x[end], y[end]) for (x, y), end in scores]
        sizes = [
            len(pairs[group[0]][0]) + sum(len(pairs[i][1]) for i in group) for group in members
        ]

        def answers(index: list[int], num_rows: int) -> list[Answer]:
            chosen = [[pairs[i] for i in members[group]] for group in index]
            found = self._continued(chosen, num_rows)
            return [tuple(map(np.array, zip(*group, strict=True))) for group in found]

        content = (array.astype(np.int64) for pair in pairs for array in pair)
        found = self._answers("loglikelihoods", sizes, content, answers)
        results = [Likelihood(0.0, True)] * len(pairs)
        for group, (values, is_greedy) in zip(members, found, strict=True):
            for i, value, greedy in zip(group, values, is_greedy, strict=True):
                results[i] = Likelihood(float(value), bool(greedy))
        return results

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
            generation = Generation(self.inference, tokenizer, chosen, state=state, **self._size)
            for event in generation:
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
        longest = [(limits[i] if limits else 0, size) for i, size in enumerate(sizes)]
        order = sorted(range(len(sizes)), key=longest.__getitem__, reverse=True)
        plan = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        num_rows, journal = self._num_rows(len(sizes)), self._journal
        key, found = "", {}
        if journal is not None:
            config = self.model.config.to_dict()
            key = journal.key(
                [kind, plan, longest, self._size],
                config,
                self.checksum,
                content=(array.tobytes() for array in content),
            )
            found = journal.read(key)
        left = [batch for batch in range(len(plan)) if batch not in found]
        work = {batch: sum(sizes[i] for i in plan[batch]) for batch in left}
        num_found = len(sizes) - sum(len(plan[batch]) for batch in left)
        progress = RowProgress(self._name, num_found, len(sizes), sum(work.values()))
        try:
            for batch in left:
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

    def _num_rows(self, count: int) -> int:
        """Rows of every batch of `count` requests: `batch_size`, or fewer in powers of two."""
        num_rows = rules.axis_size("data") * rules.axis_size("fsdp")
        while num_rows < count:
            num_rows *= 2
        return min(num_rows, self.batch_size)

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

    def _streamed(self, tokens: np.ndarray, lengths: np.ndarray) -> Scores:
        """The scores [B, T] of rows [B, T + 1] whose first `lengths` targets count."""
        state = self._state(len(tokens), tokens.shape[1])
        return self._scored(state, tokens[:, :-1], tokens[:, 1:], lengths)

    def _scored(
        self, state: InferenceState, tokens: np.ndarray, targets: np.ndarray, lengths: np.ndarray
    ) -> Scores:
        """The scores [B, T] of targets [B, T]; `state` is donated."""
        is_double = jax.config.read("jax_enable_x64")
        losses = np.zeros(tokens.shape, np.float64 if is_double else np.float32)
        scores = Scores(losses, np.zeros(tokens.shape, bool))
        done, last = np.zeros_like(lengths), []

        def fetch(start: np.ndarray, counts: np.ndarray, part: tuple[jax.Array, ...]) -> None:
            row, offset = np.nonzero(np.arange(part[0].shape[1]) < counts[:, None])
            for field, values in zip(scores, jax.device_get(part), strict=True):
                field[row, start[row] + offset] = values[row, offset]

        for counts, hidden, _ in stream(self.inference, state, tokens, lengths, **self._size):
            index = np.minimum(done[:, None] + np.arange(hidden.shape[1]), tokens.shape[1] - 1)
            part = _piece_scores(self.inference, hidden, np.take_along_axis(targets, index, axis=1))
            if last:
                fetch(*last.pop())  # while the device computes the next piece
            last.append((done, counts, part))
            done = done + counts
        for piece in last:
            fetch(*piece)
        return scores

    def _in_one_pass(self, tokens: np.ndarray, lengths: np.ndarray) -> Scores:
        """`_streamed` as one forward pass of all processes."""
        unit = rules.axis_size("seq") * (memory_chunk(self.model.config) or 1)
        tokens = np.pad(tokens, ((0, 0), (0, -(tokens.shape[1] - 1) % unit)))
        graph, params = nnx.split(self.model)
        mesh = jax.sharding.get_mesh()
        is_token = np.arange(tokens.shape[1] - 1) < lengths[:, None]
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        if _reads_ahead(self.model.config):
            batch["segment_ids"] = is_token  # padding is another document
        found = _forward_scores(graph, mesh, params, placed(batch))
        return Scores(*map(np.array, jax.device_get(found)))

    def _continued(
        self, groups: list[list[tuple[np.ndarray, np.ndarray]]], num_rows: int
    ) -> list[list[Likelihood]]:
        """The likelihoods of (context, continuation)s, a group for every context."""
        contexts = [group[0][0] for group in groups]
        lengths = np.zeros(num_rows, np.int32)
        lengths[: len(contexts)] = [*map(len, contexts)]
        most = max(len(context) + len(rest) for group in groups for context, rest in group)
        state = self._state(num_rows, most)
        dtype = self.model.config.precision.compute_dtype
        last = jnp.zeros((num_rows, self.model.config.dim), dtype)
        tokens = _padded(contexts, num_rows, int(lengths.max()))
        for counts, hidden, after in stream(self.inference, state, tokens, lengths, **self._size):
            last, state = newest_hidden(hidden, counts, last), after
        found: list[list[Likelihood]] = [[Likelihood(0.0, True)] * len(group) for group in groups]
        rows = [
            (len(rest), g, i) for g, group in enumerate(groups) for i, (_, rest) in enumerate(group)
        ]
        rows.sort(key=lambda row: -row[0])
        for first in range(0, len(rows), num_rows):
            part = rows[first : first + num_rows]
            index = np.zeros(num_rows, np.int32)
            index[: len(part)] = [group for _, group, _ in part]
            sizes = np.zeros(num_rows, np.int32)
            sizes[: len(part)] = [size for size, _, _ in part]
            rest = _padded([groups[g][i][1] for _, g, i in part], num_rows, int(sizes.max()) + 1)
            before, hidden = _taken(state, last, index)
            start = jax.device_get(_piece_scores(self.inference, hidden[:, None], rest[:, :1]))
            after = self._scored(before, rest[:, :-1], rest[:, 1:], np.maximum(sizes - 1, 0))
            losses, is_hit = (np.hstack(pair) for pair in zip(start, after, strict=True))
            for row, (size, group, member) in enumerate(part):
                found[group][member] = _likelihood(losses[row, :size], is_hit[row, :size])
        return found


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
def _taken(
    state: InferenceState, hidden: Float[Array, "B D"], index: Int[Array, " R"]
) -> tuple[InferenceState, Float[Array, "R D"]]:
    """The rows `index` of a state and of hidden states."""
    taken = jax.tree.map(lambda x: x[index], state)
    taken = jax.tree.map(lambda x, names: rules.constrain(x, *names), taken, state_axes(taken))
    return taken, rules.constrain(hidden[index], "batch", None)


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
