"""Perplexity of the last tokens of documents by the length of the context before them."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ttcd_jax.config import Positive
from ttcd_jax.errors import UserError
from ttcd_jax.measure.by_document import DocumentTask
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.selection import Selection, select
from ttcd_jax.measure.task import Subject, register


class BlockLoss(NamedTuple):
    """The losses of a document's block after so many tokens; `document` None: no document has
    them."""

    context: int
    document: int | None
    tokens: int
    nll: float


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalBlock(DocumentTask[BlockLoss]):
    """Fixed-final-block perplexity, as in the authors' code: the last `final_block` tokens of each
    document, after each of `contexts` tokens, read anew. Documents have `min_doc_tokens` (None: the
    longest context and the block), of which the last `seq_len` are kept, until these are
    `token_budget`."""

    name = "final_block"
    title = "Perplexity of the final block by length of context"
    record = BlockLoss
    key = "context"
    x_label = "tokens of context before the block"
    rank = 10
    value = "perplexity"
    sentence = "Every point is the perplexity of the same tokens, after more of the same document."
    shaping = ("contexts", "final_block")

    contexts: tuple[Positive, ...] = (1024, 2048, 4096, 8192, 16384, 24576, 30720)
    final_block: Positive = 1024
    seq_len: Positive = 32768
    token_budget: Positive = 20_000_000
    min_doc_tokens: Positive | None = None

    def validate(self) -> None:
        super().validate()
        if not self.contexts:
            raise UserError("contexts () are none: give one or more, such as --contexts=1024,2048")
        longest = max(self.contexts)
        needed = max(longest + self.final_block, self.min_doc_tokens or 0)
        if needed > self.seq_len:
            raise UserError(
                f"contexts up to {longest} and final_block {self.final_block} (min_doc_tokens "
                f"{self.min_doc_tokens}) need {needed} tokens, and seq_len {self.seq_len} are kept "
                "of a document: raise seq_len"
            )

    def choose(self, documents: Iterator[np.ndarray], subject: Subject) -> Selection:
        return select(
            (ids[-self.seq_len :] for ids in documents),
            lambda ids: ids,
            min_tokens=self.min_doc_tokens or max(self.contexts) + self.final_block,
            max_tokens=self.token_budget,
        )

    def measure(self, scorer: Scorer, rows: Selection, subject: Subject) -> list[BlockLoss]:
        records: list[BlockLoss] = []
        for context in sorted(set(self.contexts)):
            size = context + self.final_block
            chosen = {i: ids[-size:] for i, ids in enumerate(rows.documents) if ids.size >= size}
            scores = scorer.losses([*chosen.values()])
            sums = (x.losses[context - 1 :].sum(dtype=np.float64) for x in scores)
            records += [
                BlockLoss(context, i, self.final_block, float(nll))
                for i, nll in zip(chosen, sums, strict=True)
            ] or [BlockLoss(context, None, 0, 0.0)]
        return records
