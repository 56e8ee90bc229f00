"""A model that scores token rows and writes texts, for every evaluation.

Requests are sorted by length, the longest first, and computed in batches of similar length and few
shapes. Long rows are streamed through `inference.prefill` in pieces, so that a row of any length
takes the same memory. Answers are in the order of the requests.

Short rows are read in one forward pass, and all where inference has no state (rows cut along `seq`,
several processes, a model that reads ahead); any split of a row gives the same scores.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax import units
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import NonFiniteError, ResourceError, UserError
from ttcd_jax.inference import state as states
from ttcd_jax.inference.decode import head_weight
from ttcd_jax.inference.generate import Generation, Request
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.inference.prefill import stream
from ttcd_jax.inference.state import InferenceState
from ttcd_jax.measure.journal import Answer, Journal
from ttcd_jax.models.config import memory_chunk
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.row import Control
from ttcd_jax.sharding import rules
from ttcd_jax.sharding.rules import Placement
from ttcd_jax.terminal import Progress
from ttcd_jax.tokens import check_tokens
from ttcd_jax.train.hardware import device_bytes
from ttcd_jax.train.loss import token_scores

# Rows of at most so many tokens are read in one forward pass: one program instead of several, and
# no copy of the parameters.
ONE_PASS = 2048
# Multiplications that take as long as compiling a forward pass, on a CPU and elsewhere: so many are
# spent on padding before one for shorter rows is compiled, and 16 times as many, the programs of a
# state, on contexts that are read again.
WORK = 2**36, 2**48
type Rows = Sequence[np.ndarray]


class Scores(NamedTuple):
    """Arrays [T], or [rows, T]."""

    losses: np.ndarray  # negative log-likelihood of the target, nats
    is_hit: np.ndarray  # whether the target is the likeliest token


class Likelihood(NamedTuple):
    """A continuation of a context."""

    log_likelihood: float  # of all tokens, nats
    is_greedy: bool  # whether each is the likeliest token


def check_numbers(what: str, are_numbers: bool) -> None:
    """Raises `NonFiniteError` where answers would hide that they are of no number."""
    if not are_numbers:
        raise NonFiniteError(
            f"{what} of the model are nan: it diverged, evaluate an earlier --step or shorter texts"
        )


def batches(count: int, batch_size: int) -> list[np.ndarray]:
    """Indices of `count` rows in batches of one shape: the first rows fill the last."""
    return [np.arange(i, i + batch_size) % count for i in range(0, count, batch_size)]


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
    same batches, so an evaluation that goes on gives the same bits.

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
    ) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self._name, self._journal = name, journal

    @functools.cached_property
    def inference(self) -> InferenceModel:
        """The model for inference, a copy of its parameters."""
        return inference_model(self.model)

    @functools.cached_property
    def checksum(self) -> list[int]:
        """A checksum of every parameter, the same on any mesh."""
        return [int(x) for x in jax.tree.leaves(_checksums(nnx.state(self.model)))]

    def losses(self, rows: Rows, targets: Rows | None = None) -> list[Scores]:
        """The scores [T] of tokens 1 .. T of every row [T + 1], int, read as it is; or of `targets`
        [T] in their place."""
        return self._scores([np.asarray(row) for row in rows], [0] * len(rows), targets)

    def controlled(self, rows: Rows, control: Control, targets: Rows) -> list[Scores]:
        """`losses` of rows of one length under a control of the memories, read in one pass: of
        rows half of their number apart, so that none holds its own writes, and few a neighbor's."""
        found: dict[int, Scores] = {}
        least, half = rules.axis_size("data") * rules.axis_size("fsdp"), -(-len(rows) // 2)
        size = max(min(self.batch_size, len(rows)) // least, 1) * least
        size += least * (size > len(rows) and size % len(rows) == 1)  # its first row is its last
        order = np.array([i // 2 + i % 2 * half for i in range(len(rows))])
        pairs = np.stack([np.stack(rows)[:, :-1], np.stack(targets)], axis=2)
        length = pairs.shape[1]
        for index in (order[batch] for batch in batches(len(rows), size)):
            scores = self._in_one_pass(pairs[index], np.full(size, length), control)
            for i, *fields in zip(index.tolist(), *scores, strict=True):
                found[i] = Scores(*(x[:length] for x in fields))
        return [found[i] for i in range(len(rows))]

    def loglikelihoods(self, requests: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Likelihood]:
        """The likelihood of every (context, continuation), tokens [C] and [T], each of at least one
        token. Equal contexts are read once, except few short ones."""
        if not all(len(context) for context, _ in requests):
            raise UserError("a context is empty: give it at least one token, bos for example")
        if empty := [index for index, (_, rest) in enumerate(requests) if not len(rest)]:
            raise UserError(f"continuation {empty[0]} is empty and has no likelihood: leave it out")
        rows = [np.concatenate(pair) for pair in requests]
        found = self._scores(rows, [len(context) - 1 for context, _ in requests])
        sums = (-float(scores.losses.sum(dtype=np.float64)) for scores in found)
        return [*map(Likelihood, sums, (bool(scores.is_hit.all()) for scores in found))]

    def generate(self, requests: Sequence[Request]) -> list[str]:
        """The text that follows every prompt. Raises `UserError` without a tokenizer, and where
        inference has no state, `NonFiniteError` for a state with NaN."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UserError("a run without a tokenizer generates no text: import it with one")
        if jax.process_count() > 1:
            raise UserError(
                f"text is generated in one process, not in {jax.process_count()}: leave "
                "--distributed out"
            )
        sizes = [(x.max_new_tokens, len(x.tokens) + 1 + x.max_new_tokens) for x in requests]
        padding = Request(tokens=[tokenizer.bos_id], max_new_tokens=0)

        def answers(index: Sequence[int], num_rows: int) -> list[Answer]:
            chosen = [requests[i] for i in index] + [padding] * (num_rows - len(index))
            state = self._state(num_rows, max(sizes[i][1] for i in index))
            texts = [""] * num_rows
            generation = Generation(self.inference, tokenizer, chosen, state=state)
            for event in generation:
                texts[event.row] += event.text
            check_numbers("states", not _num_nan(generation.state))
            coded = (text.encode(errors="surrogatepass") for text in texts[: len(index)])
            return [(np.frombuffer(text, np.uint8),) for text in coded]

        prompts = [np.asarray(x.tokens).tolist() for x in requests]
        parts = zip(prompts, ((x.sampling, x.stop, x.stop_tokens) for x in requests), strict=True)
        found = self._answers("generate", sizes, (repr(part).encode() for part in parts), answers)
        return [text.tobytes().decode(errors="surrogatepass") for (text,) in found]

    def _scores(self, ids: Rows, starts: list[int], targets: Rows | None = None) -> list[Scores]:
        """The scores of the tokens of every row after that at its start. What is before a start is
        read once for all rows that begin so, if it is long, or there are many."""
        groups: dict[Any, list[int]] = {}
        for row in (*ids, *(targets or ())):
            check_tokens(row, self.model.config.vocab_size)
        for i, (row, start) in enumerate(zip(ids, starts, strict=True)):
            groups.setdefault(row[:start].astype(np.int64).tobytes() or i, []).append(i)
        targets = targets or [row[1:] for row in ids]
        # A row [T, 2]: every token that is read, and its target.
        rows = [np.stack([row[:-1], own], axis=1) for row, own in zip(ids, targets, strict=True)]
        sizes = [*map(len, rows)]
        longest = max(sizes, default=0)
        repeated = sum(starts) - sum(starts[i] for i, *_ in groups.values())
        is_shared = self._is_streamed and repeated > (0 if longest > ONE_PASS else 16 * self._spare)
        members = [*groups.values()] if is_shared else [[i] for i in range(len(rows))]
        reads = starts if is_shared else [0] * len(rows)  # tokens without scores
        shapes = _pass_sizes([size for size in sizes if size <= ONE_PASS], self._spare)

        def answers(index: Sequence[int], num_rows: int) -> list[Answer]:
            chosen = [members[group] for group in index]
            most = max(sizes[i] for group in chosen for i in group)
            if self._is_streamed and (is_shared or most > ONE_PASS):
                return self._streamed(rows, reads, chosen, num_rows)
            length = min(x for x in shapes if x >= most) if self._is_streamed else longest
            padded = _padded([rows[i] for (i,) in chosen], num_rows, length)
            fields = self._in_one_pass(*padded)
            return [tuple(x[row, : sizes[i]] for x in fields) for row, (i,) in enumerate(chosen)]

        work = [(0, reads[x[0]] + sum(sizes[i] - reads[i] for i in x)) for x in members]
        content = (x.astype(np.int64).tobytes() for x in (*rows, np.array([*map(len, members)])))
        results: dict[int, Scores] = {}
        found = self._answers("scores", work, content, answers)
        for group, answer in zip(members, found, strict=True):
            for i, scores in zip(group, itertools.batched(answer, 2), strict=True):
                results[i] = Scores(*(x[starts[i] - reads[i] :] for x in scores))
        return [results[i] for i in range(len(rows))]

    def _answers(
        self,
        kind: str,
        sizes: Sequence[tuple[int, int]],
        content: Iterator[bytes],
        answers: Callable[[Sequence[int], int], list[Answer]],
    ) -> list[Answer]:
        """The answers to all requests, computed by `answers(indices, rows of the batch)`. `sizes`:
        (steps after it is read, tokens) of each; a batch has requests of similar ones."""
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        plan, shapes, journal, key, found = [], [], self._journal, "", {}
        while order:
            most = max(sizes[i][1] for i in order[: self.batch_size])
            shapes.append(self._num_rows(len(sizes), most))
            plan.append(order[: shapes[-1]])
            order = order[shapes[-1] :]
        if journal is not None:
            parts = [kind, plan, sizes], self.model.config.to_dict(), self.checksum
            key = journal.key(*parts, content=content)
            found = journal.read(key)
        left = [batch for batch in range(len(plan)) if batch not in found]
        work = {batch: sum(sizes[i][1] for i in plan[batch]) for batch in left}
        rows, done = len(sizes) - sum(len(plan[batch]) for batch in left), 0
        progress = Progress(sys.stderr, sum(work.values()))
        if self._name and progress.is_live:
            progress.show(f"{self._name}: {rows} of {len(sizes)} rows")
        try:
            for batch in left:
                found[batch] = answers(plan[batch], shapes[batch])
                if journal is not None:
                    journal.add(key, batch, found[batch])
                rows, done = rows + len(plan[batch]), done + work[batch]
                if self._name:
                    progress.report(done, f"{self._name}: {rows} of {len(sizes)} rows")
        finally:
            if journal is not None:
                journal.write(key)
            progress.end()
        pairs = (zip(index, found[batch], strict=True) for batch, index in enumerate(plan))
        results = dict(itertools.chain.from_iterable(pairs))
        return [results[i] for i in range(len(sizes))]

    def _num_rows(self, count: int, most: int) -> int:
        """The rows of a batch, of `count` requests, of at most so many tokens: `batch_size`, as
        far as it divides among the devices, or fewer in powers of two, whose states take a quarter
        of a device's memory. Raises `ResourceError` where not one row fits."""
        rows = least = rules.axis_size("data") * rules.axis_size("fsdp")
        while rows < count:
            rows *= 2
        rows = max(min(rows, self.batch_size) // least, 1) * least
        if not self._is_streamed:
            return rows
        whole = device_bytes()
        state = states.state_bytes(self.model.config, 1, self._capacity(most))["total"]
        if state > whole:
            sizes = f"takes {units.size(state)}, and there is {units.size(whole)} of memory"
            raise ResourceError(f"the state of a row of {most:,} tokens {sizes}: take shorter rows")
        while rows > least and state * rows // least > whole / 4:
            rows = max(rows // 2, least)
        return rows

    @functools.cached_property
    def _is_streamed(self) -> bool:
        """Whether inference has a state of this model here."""
        is_alone = jax.process_count() == 1 and rules.axis_size("seq") == 1
        return is_alone and not states.reads_ahead(self.model.config)

    @functools.cached_property
    def _spare(self) -> int:
        """Tokens that take as long as a program to compile."""
        params = jax.tree.leaves(nnx.state(self.model, nnx.Param))
        return WORK[jax.default_backend() != "cpu"] // sum(x.size for x in params)

    def _capacity(self, most: int) -> int | None:
        """The length of a state for rows of at most `most` tokens, one of few; None: any."""
        step = 1 << max((most - 1).bit_length() - 3, 0)
        return max(128, -(-most // step) * step) if self.model.config.window is None else None

    def _state(self, num_rows: int, most: int) -> InferenceState:
        return states.start_state(self.inference, num_rows, max_length=self._capacity(most))

    def _streamed(self, rows: Rows, reads: list[int], groups: Any, num_rows: int) -> list[Answer]:
        """The scores of `groups` (indices) of rows [T, 2] from their `reads` on, the number of
        tokens that all of a group begin with; an answer has those of all its rows."""
        state = self._state(num_rows, max(len(rows[i]) + 1 for group in groups for i in group))
        padded, lengths = _padded([rows[i][: reads[i]] for i, *_ in groups], num_rows)
        for _, _, after in stream(self.inference, state, padded[..., 0], lengths):
            state = after
        ends = [(len(rows[i]) - reads[i], i, g) for g, group in enumerate(groups) for i in group]
        found: dict[int, Answer] = {}
        for part in itertools.batched(sorted(ends, reverse=True), num_rows):
            before = state
            if lengths.any():  # else a part is all, and every row of the state is the same
                before = _taken(state, _filled([group for *_, group in part], num_rows))
            scores = self._read(before, [rows[i][reads[i] :] for _, i, _ in part])
            found |= zip((i for _, i, _ in part), scores, strict=True)
        return [tuple(x for i in group for x in found[i]) for group in groups]

    def _read(self, state: InferenceState, rows: Rows) -> list[Answer]:
        """The scores [T] of rows [T, 2] after `state`, which is donated; some T is not 0."""
        padded, lengths = _padded(rows, len(state.position))
        tokens, targets = np.moveaxis(padded, 2, 0)
        found: list[list[Answer]] = [[] for _ in rows]
        waiting, done = [], np.zeros_like(lengths)

        def fetch(counts: np.ndarray, part: tuple[jax.Array, ...]) -> None:
            for row, count, *fields in zip(found, counts, *jax.device_get(part), strict=False):
                row.append(tuple(field[:count] for field in fields))

        for counts, hidden, _ in stream(self.inference, state, tokens, lengths):
            index = np.minimum(done[:, None] + np.arange(hidden.shape[1]), lengths.max() - 1)
            own = np.take_along_axis(targets, index, axis=1)
            waiting.append((counts, _piece_scores(self.inference, hidden, own)))
            if len(waiting) > 1:  # while the device computes the next piece
                fetch(*waiting.pop(0))
            done = done + counts
        for piece in waiting:
            fetch(*piece)
        return [tuple(map(np.concatenate, zip(*parts, strict=True))) for parts in found]

    def _in_one_pass(
        self, rows: np.ndarray, lengths: np.ndarray, control: Control | None = None
    ) -> Scores:
        """The scores [B, T] of rows [B, T, 2] of which the first `lengths` count, from one forward
        pass of all processes."""
        unit = rules.axis_size("seq") * (memory_chunk(self.model.config) or 1)
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % unit), (0, 0)))
        batch = {"tokens": rows[..., 0], "targets": rows[..., 1]}
        if states.reads_ahead(self.model.config):  # padding is another document
            batch["segment_ids"] = np.arange(rows.shape[1]) < lengths[:, None]
        found = _forward_scores(*nnx.split(self.model), placed(batch), control)
        return Scores(*map(np.array, jax.device_get(found)))


def whole[Tree](tree: Tree) -> Tree:
    """Arrays that every process can read, whatever the mesh in use."""
    return jax.tree.map(lambda x: rules.constrain(x, *(None,) * x.ndim), tree)


def _pass_sizes(sizes: Sequence[int], spare: int) -> list[int]:
    """The lengths to which rows of `sizes` are padded, few: the longest, and shorter ones, powers
    of two or 3/4 of them from 16 on, that spare more than so many tokens."""
    found = [max(sizes, default=0)]
    for index, size in enumerate(sorted(sizes, reverse=True)):
        power = 1 << max(size - 1, 0).bit_length()
        shorter = max(power * 3 // 4 if size <= power * 3 // 4 else power, 16)
        if (found[-1] - shorter) * (len(sizes) - index) > spare:
            found.append(shorter)
    return found


def _filled(values: Sequence[int], num_rows: int) -> np.ndarray:
    """Values of the first of `num_rows` rows [num_rows] int32, the others zero."""
    return np.array([*values, *[0] * (num_rows - len(values))], np.int32)


def _padded(rows: Rows, num_rows: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The rows [T, 2] as one array [num_rows, length, 2] (None: the longest), padded with zeros,
    and their lengths."""
    lengths = _filled([*map(len, rows)], num_rows)
    padded = np.zeros((num_rows, lengths.max() if length is None else length, 2), np.int64)
    for own, row in zip(padded, rows, strict=False):
        own[: len(row)] = row
    return padded, lengths


@jax.jit
def _piece_scores(
    model: InferenceModel, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> tuple[jax.Array, jax.Array]:
    return token_scores(hidden, head_weight(model), targets)


@jax.jit
def _taken(state: InferenceState, index: Int[Array, " R"]) -> InferenceState:
    """The rows `index` of a state."""
    taken = jax.tree.map(lambda x: x[index], state)
    axes = states.state_axes(taken)
    return jax.tree.map(lambda x, names: rules.constrain(x, *names), taken, axes)


@jax.jit
def _num_nan(tree: Any) -> Any:
    return sum(jnp.isnan(x).sum() for x in jax.tree.leaves(tree))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _forward_scores(
    graph: nnx.GraphDef[Transformer],
    params: nnx.GraphState,
    batch: dict[str, Any],
    control: Control | None,
) -> tuple[jax.Array, jax.Array]:
    """One program for every evaluation of a model, however often its parameters change."""
    model = nnx.merge(graph, params)
    hidden, _ = model.forward(batch["tokens"], batch.get("segment_ids"), control=control)
    return whole(token_scores(hidden, model.head_weight(), batch["targets"]))


@jax.jit
def _checksums(params: Any) -> Any:
    """For every array, the sum of its bits times odd numbers, modulo 2^32: sums of integers are
    exact in any order."""

    def checksum(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")
        factors = np.uint32(2654435761) * jnp.arange(bits.size, dtype=jnp.uint32) | 1
        return jnp.sum(bits.astype(jnp.uint32) * factors.reshape(bits.shape), dtype=jnp.uint32)

    return whole(jax.tree.map(checksum, params))
