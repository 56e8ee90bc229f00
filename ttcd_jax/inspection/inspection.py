"""`ttcd_jax.inspect`: the memories of a model along a text, as arrays, pictures and controls."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from ttcd_kernels.table import Row

from ttcd_jax.errors import UserError
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.inference.text import TextStream
from ttcd_jax.inspection import reading, show
from ttcd_jax.inspection.contributions import Memory
from ttcd_jax.memory.prefix import SumMemory
from ttcd_jax.memory.running import CorrectingMemory
from ttcd_jax.methods.in_place import Operands
from ttcd_jax.tasks.controls import check_control, lacks
from ttcd_jax.tokens import check_tokens
from ttcd_jax.units import printable

type Text = str | np.ndarray | Sequence[int]
PerToken = Float[np.ndarray, " T"]
MOST_QUERIES = 64  # by default


class Reads(NamedTuple):
    """Who wrote what some tokens read, exactly (`ttcd_jax.inspection.contributions`), in float64:
    read_t = sum over s of weight[t, s] e_s. The share of s in a read, (weight e_s) . read /
    |read|^2, is signed; those of a read add up to 1, or are 0 where nothing was read."""

    layers: tuple[int, ...]
    queries: Int[np.ndarray, " N"]  # positions of the tokens that read
    weight: Float[np.ndarray, "Y N T Q"]
    share: Float[np.ndarray, "Y N T"]
    read: Float[np.ndarray, "Y N D"]


class Answer(NamedTuple):
    """The tokens that wrote most of what was read to predict `token`, the greatest share first."""

    token: int
    query: int  # the token before it, which read
    positions: Int[np.ndarray, " n"]
    shares: Float[np.ndarray, " n"]
    texts: tuple[str, ...]  # around every position, the token itself in brackets

    def table(self) -> list[Row]:
        rows = zip(self.positions.tolist(), self.shares.tolist(), self.texts, strict=True)
        return [{"token": x, "share of the read": y, "written there": z} for x, y, z in rows]

    def _repr_html_(self) -> str:
        return show.page_part(show.answer(self))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Inspection:
    """What the memories of some layers (Y of them) do along a row of T tokens, C chunks of L.
    Losses are in nats; arrays are the host's; nothing has a gradient. The operands are kept, about
    2 (F + D) numbers for a token and a layer; all else is computed when it is asked for."""

    run: Any
    model: InferenceModel
    tokens: Int[np.ndarray, " T"]
    segments: Int[np.ndarray, " T"] | None  # a number for every document; None: one
    loss_on: PerToken  # of a token, given those before it; NaN where a document begins
    memories: dict[int, Memory]  # by layer

    def __repr__(self) -> str:
        return f"<{len(self.tokens):,} tokens, memories in layers {[*self.layers]}>"

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.memories)

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The text that every token completes; joined they are the row's."""
        if self.run.tokenizer is None:
            return tuple(f"{token} " for token in self.tokens)
        stream = TextStream(self.run.tokenizer)
        return tuple(stream.push(int(token)) for token in self.tokens)

    @functools.cached_property
    def loss_off(self) -> PerToken:
        """The losses when no memory is read (eta = 0)."""
        everywhere = range(len(self.model.blocks))
        return self._losses(reading.without(self.model, everywhere, len(self.tokens)))

    @property
    def gain(self) -> PerToken:
        """loss_off - loss_on: above 0 the memories helped with the token."""
        return self.loss_off - self.loss_on

    @property
    def gate(self) -> Float[np.ndarray, "Y T"]:
        """beta; 1 without a gate."""
        return self._by_token(lambda x: x.gate)

    @property
    def window_share(self) -> Float[np.ndarray, "Y C"]:
        """|e - e'|^2 / |e|^2 of the errors e, e' those of equal windows; NaN without either."""
        return np.stack([x.window_share for x in self.memories.values()])

    @functools.cached_property
    def write_norm(self) -> Float[np.ndarray, "Y T"]:
        """|k^T u|_F, what every token wrote: by the delta rule its error less what the memory
        answered to its key. 0 where nobody can read it, as its document ends in its chunk."""
        norm = functools.partial(np.linalg.norm, axis=-1)
        return self._by_token(lambda x: norm(x.walk.writes) * norm(x.keys))

    @functools.cached_property
    def read_norm(self) -> Float[np.ndarray, "Y T"]:
        """|eta z S|, of what the memory adds to the layer's output."""
        return self._by_token(lambda x: x.walk.reads)

    @functools.cached_property
    def loudness(self) -> Float[np.ndarray, "Y C1"]:
        """|eta S|_F / |W_base|_F before every chunk, and after the last."""
        return np.stack([abs(x.eta) * x.walk.sizes / x.base for x in self.memories.values()])

    def without_layer(self, layer: int) -> PerToken:
        self.memory(layer)
        return self._losses(reading.without(self.model, [layer], len(self.tokens)))

    def with_memory_of(self, text: Text) -> PerToken:
        """The losses when the text reads what another one wrote at the same places. Raises
        `UserError` for one of fewer tokens; what is beyond is left out."""
        other, _ = row_of(self.run.tokenizer, text)
        if len(other) < (count := len(self.tokens)):
            raise UserError(f"the other text has {len(other)} tokens: give {count} or more")
        rows = np.stack([self.tokens, other[:count]])
        check_tokens(rows, self.model.config.vocab_size)
        return self._losses(self.model, rows, "foreign")

    def with_shuffled_keys(self) -> PerToken:
        """The losses when errors are stored under keys of other tokens of their chunk."""
        check_control(self.model.config, "shuffled")
        return self._losses(self.model, control="shuffled")

    def without_gap(self) -> PerToken:
        """The losses when the student's window is the teacher's."""
        check_control(config := self.model.config, "no_gap")
        equal = config.replace(**config.without_gap(len(self.tokens)))
        return self._losses(self.model.by(equal))

    def reads(
        self, queries: Sequence[int] | np.ndarray | None = None, layers: Sequence[int] | None = None
    ) -> Reads:
        """Who wrote what the tokens at `queries` read (default: those that predicted the 64 tokens
        of the greatest gain). Takes Y N T numbers. Raises `UserError` for other positions and
        layers."""
        if queries is None:
            order = np.argsort(-np.nan_to_num(self.gain[1:], nan=-np.inf), kind="stable")
            queries = np.sort(order[:MOST_QUERIES])
        at, count = np.asarray(queries, np.int64).reshape(-1), len(self.tokens)
        if at.size and not 0 <= at.min() <= at.max() < count:
            raise UserError(f"queries {at.min()} .. {at.max()} of a row of {count} tokens")
        chosen, found = self.layers if layers is None else tuple(layers), []
        if not chosen:
            raise UserError(f"reads of no layer: give some of {self.layers}")
        for memory in map(self.memory, chosen):
            w = memory.weights(at)[:, :count]
            e = memory.errors.reshape(-1, w.shape[2], memory.errors.shape[2] // w.shape[2])[:count]
            read = np.einsum("NTQ,TQD->NQD", w, e)
            dots = np.einsum("NTQ,NTQ->NT", w, np.einsum("NQD,TQD->NTQ", read, e))
            squares = np.sum(read**2, axis=(1, 2))[:, None]
            found.append((w, dots / np.where(squares > 0, squares, 1), read.reshape(len(at), -1)))
        return Reads(chosen, at, *map(np.stack, zip(*found, strict=True)))

    def contribution(self, layer: int, query: int, writer: int) -> Float[np.ndarray, " D"]:
        """What a read loses if the writer's error were zero, while it erases as it did."""
        return self._weighted(layer, query, writer, self.memory(layer).errors)

    def removal(self, layer: int, query: int, writer: int) -> Float[np.ndarray, " D"]:
        """What a read loses if the writer neither stored nor erased anything."""
        return self._weighted(layer, query, writer, self.memory(layer).walk.writes)

    def writers(self, token: int, count: int = 8, layer: int | None = None) -> Answer:
        """Who answered `token`: the tokens with the greatest shares in what was read to predict it,
        in one layer, or in all in proportion to the sizes of their reads."""
        if not 0 < token < len(self.tokens):
            raise UserError(f"token {token} of a row of {len(self.tokens)}: from 1 on")
        found = self.reads([token - 1], None if layer is None else [layer])
        sizes = np.linalg.norm(found.read[:, 0], axis=-1)
        total = sizes @ found.share[:, 0] / (sizes.sum() or 1)
        order = np.argsort(-total, kind="stable")[:count]
        order = order[total[order] > 0]
        return Answer(token, token - 1, order, total[order], tuple(map(self.around, order)))

    def around(self, token: int, reach: int = 12) -> str:
        before, after = self.texts[max(token - reach, 0) : token], self.texts[token + 1 :][:reach]
        return printable(f"{''.join(before)}[{self.texts[token]}]{''.join(after)}")

    def find(self, text: str) -> Int[np.ndarray, " n"]:
        """The tokens that complete the first character of every occurrence of a text."""
        whole = "".join(self.texts)
        starts = [i for i in range(len(whole)) if text and whole.startswith(text, i)]
        return np.searchsorted(np.cumsum([*map(len, self.texts)]), starts, side="right")

    def table(self) -> list[Row]:
        """A row for every layer: means over tokens, the loudness after the row, and the mean loss
        with all memories, without this one, and without any."""
        shares = [share[np.isfinite(share)] for share in self.window_share]
        return [
            {
                "layer": layer,
                "gate": float(self.gate[i].mean()),
                "|eta S|/|W| at the end": float(self.loudness[i, -1]),
                "share of the windows": float(shares[i].mean()) if shares[i].size else None,
                "loss": float(np.nanmean(self.loss_on)),
                "without any": float(np.nanmean(self.loss_off)),
                "without this memory": float(np.nanmean(self.without_layer(layer))),
            }
            for i, layer in enumerate(self.layers)
        ]

    def controls(self, other: Text | None = None) -> list[Row]:
        """The mean losses as it is and under every control that the model can have."""
        missing = lacks(self.model.config)
        losses = {"as it is": self.loss_on, "memory off": self.loss_off}
        losses |= {} if missing["shuffled"] else {"shuffled keys": self.with_shuffled_keys()}
        losses |= {} if missing["no_gap"] else {"no gap": self.without_gap()}
        losses |= {} if other is None else {"another text's memory": self.with_memory_of(other)}
        means = {name: float(np.nanmean(x)) for name, x in losses.items()}
        return [{"control": x, "loss": y, "more": y - means["as it is"]} for x, y in means.items()]

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it by name, with the default `reads`, for `numpy.savez`."""
        names = ("tokens", "loss_on", "loss_off", "gain", "gate", "write_norm", "read_norm")
        names += ("loudness", "window_share")
        found = {x: getattr(self, x) for x in names} | self.reads()._asdict()
        found["layers"] = np.array(self.layers)
        return found | ({} if self.segments is None else {"segments": self.segments})

    def show(self, what: str = "gain", **options: Any) -> show.Shown:
        """For a notebook: the text coloured by "gain", by "gate" or by "write" (|k^T u|) of a
        `layer`; "loudness" along the row; "reads" x writes of a `layer`, of `queries`."""
        return show.view(self, what, **options)

    def _repr_html_(self) -> str:
        return show.page_part(show.rows_of(self.table()), self.show().html)

    def memory(self, layer: int) -> Memory:
        """The operands of a layer's memory. Raises `UserError` for a layer not inspected."""
        if layer not in self.memories:
            raise UserError(f"layer {layer} is none of the inspected {[*self.layers]}")
        return self.memories[layer]

    def _by_token(self, values: Callable[[Memory], np.ndarray]) -> np.ndarray:
        found = np.stack([values(x).reshape(-1) for x in self.memories.values()])
        return found[:, : len(self.tokens)]

    def _weighted(self, layer: int, query: int, writer: int, values: np.ndarray) -> np.ndarray:
        w = self.reads([query], [layer]).weight[0, 0, writer]
        value = values.reshape(-1, values.shape[-1])[writer]
        return np.repeat(w, len(value) // len(w)) * value

    def _losses(
        self, model: InferenceModel, rows: np.ndarray | None = None, control: Any = None
    ) -> PerToken:
        rows = self.tokens[None] if rows is None else rows
        return reading.read_row(model, rows, self.segments, control=control)[0]


def inspect(
    run: Any, text: Text | list[Text], *, layers: Sequence[int] | None = None
) -> Inspection:
    """Looks at the memories of a run's model while it reads a text.

        seen = ttcd_jax.inspect(ttcd_jax.load_run("examples/model"), "A text ...")
        seen.gain, seen.gate, seen.writers(40)

    `run`: a `LoadedRun`. `text`: a str, which begins with bos as documents do, or tokens [T] int as
    they are; a list of texts is documents of one row. `layers`: those to look at, by default all
    that have a memory. Forward passes only. Raises `UserError` for a model without a memory or with
    one that is no sum of what tokens store, for other layers, and for less than two tokens.
    """
    model = inference_model(run.model)
    found = reading.memories(model)
    tokens, segments = row_of(run.tokenizer, text)
    check_tokens(tokens, model.config.vocab_size)
    chosen = tuple(found) if layers is None else tuple(sorted({*layers}))
    if not chosen or not {*chosen} <= {*found}:
        raise UserError(f"layers {[*chosen]}: the memories are in {[*found]}")
    losses, operands = reading.read_row(model, tokens[None], segments, layers=chosen)
    memories = {layer: _joined(found[layer], operands[layer]) for layer in chosen}
    return Inspection(run, model, tokens, segments, losses, memories)


def row_of(tokenizer: Any, text: Text | list[Text]) -> tuple[np.ndarray, np.ndarray | None]:
    """(tokens [T], a number for the document of each; None for one). Raises `UserError` for what is
    neither text nor tokens, and for less than two of these."""
    is_list = isinstance(text, list) and not all(isinstance(x, int) for x in text)
    documents = []
    for part in text if is_list else [text]:
        if isinstance(part, str) and tokenizer is None:
            raise UserError("a run without a tokenizer reads tokens, not text: give ids [T]")
        is_text = isinstance(part, str)
        documents.append(np.array([tokenizer.bos_id, *tokenizer.encode(part)] if is_text else part))
        if documents[-1].ndim != 1 or documents[-1].dtype.kind not in "iu":
            got = f"{documents[-1].dtype} {[*documents[-1].shape]}"
            raise UserError(f"a text is a str, or tokens [T] int, and this is {got}")
    if (count := sum(map(len, documents))) < 2:
        raise UserError(f"a text of {count} tokens has no loss: give two or more")
    numbers = np.repeat(np.arange(len(documents), dtype=np.int32), [*map(len, documents)])
    return np.concatenate(documents).astype(np.int32), numbers if is_list else None


def _joined(memory: SumMemory, parts: list[Operands]) -> Memory:
    """The operands of a whole row; those of 16 bits in float32, for numpy's sums and files."""

    def whole(get: Callable[[Operands], Any], default: Any = None) -> Any:
        if default is None and get(parts[0]) is None:
            return None
        arrays = ((get(x), x.writes.keys.shape[1:3]) for x in parts)
        joined = np.concatenate([np.full(y, default) if x is None else x[0] for x, y in arrays])
        return joined.astype(np.float32) if joined.dtype.itemsize == 2 else joined

    keys, errors = whole(lambda x: x.writes.keys), whole(lambda x: x.writes.errors)
    mine, decay = whole(lambda x: x.mask.writes, True), whole(lambda x: x.writes.log_decay)
    resets, corrects = whole(lambda x: x.mask.resets), isinstance(memory, CorrectingMemory)
    squares = np.sum(errors**2, axis=-1, dtype=float, where=mine[..., None]).sum(1)
    windows = np.sum(whole(lambda x: x.window_squares, np.nan), axis=1, where=mine)
    return Memory(
        eta=memory.options.eta,
        reads=keys if memory.reads_own_chunk else whole(lambda x: x.reads),
        keys=keys,
        errors=errors,
        rate=whole(lambda x: x.writes.rate, 1.0) if corrects else None,
        log_decay=None if decay is None else np.sum(decay * mine[..., None], 1, dtype=float),
        reads_own_chunk=memory.reads_own_chunk,
        mine=mine,
        sees=whole(lambda x: x.mask.reads, True),
        resets=np.zeros(len(keys), bool) if resets is None else resets,
        segments=whole(lambda x: x.segments),
        base=float(np.linalg.norm(np.asarray(memory.w_base, float))),
        gate=whole(lambda x: x.gate, 1.0),
        window_share=np.where(squares > 0, windows / np.where(squares > 0, squares, 1), np.nan),
    )
