"""Distances between two ways to compute a run: of their layers and of their predictions.

    layers        every block on the reference's input: the shares of its outputs that are equal,
                  or within one or two units in the last place
    distribution  p (reference) and q (candidate) of the next token, at every position of held-out
                  text: KL(p || q), total variation |p - q| / 2, whether the likeliest token differs

Of their answers to samples of RULER: both scores, and the share that is equal.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels import parity

from experiments.studies.equivalence.ways import Computed
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.measure.scorer import batches
from ttcd_jax.nn.block import Block
from ttcd_jax.tasks.perplexity import bucket_edges
from ttcd_jax.tasks.ruler import TASKS
from ttcd_jax.tasks.ruler.samples import Sample, score

QUANTILES = {"50%": 0.5, "90%": 0.9, "99%": 0.99, "99.9%": 0.999, "max": 1.0}
_LOGITS = 2**26  # held at once, for each way

Facts = dict[str, Any]


def agreement(candidate: jax.Array, reference: jax.Array) -> dict[str, float]:
    """Shares of elements that are equal, within one and within two units in the last place, and
    the largest distance in such units, all in the narrower of the two dtypes; the largest
    difference over the largest magnitude."""
    pair = np.asarray(candidate), np.asarray(reference)
    ulps = parity.ulps(*sorted(pair, key=lambda x: x.dtype.itemsize))
    return {
        "equal_share": float((ulps == 0).mean()),
        "within_1_ulp": float((ulps <= 1).mean()),
        "within_2_ulp": float((ulps <= 2).mean()),
        "max_ulp": int(ulps.max()),
        "max_relative_error": parity.relative_error(*pair),
    }


def compare_layers(reference: Computed, candidate: Computed, tokens: np.ndarray) -> list[Facts]:
    """`agreement` on tokens [B, T], by name (`outputs of`): of every block on the reference's input
    to it, so that an error appears in the block that causes it, and of the hidden states before the
    head. If either way reads pieces, only the hidden states are compared."""
    h = embeddings = reference.unstacked.embedding[...].astype(reference.dtype)[tokens]
    parts = {}
    num_layers = reference.config.num_layers
    for layer in range(num_layers if reference.way.path == candidate.way.path == "forward" else 0):
        inputs = h.astype(candidate.dtype), embeddings.astype(candidate.dtype)
        h = _outputs(*reference.block(layer), h, embeddings)
        parts[f"layer {layer}"] = agreement(_outputs(*candidate.block(layer), *inputs), h)
    parts["whole model"] = agreement(candidate.hidden(tokens), reference.hidden(tokens))
    return [{"outputs of": name} | shares for name, shares in parts.items()]


@functools.partial(jax.jit, static_argnums=0)
def _outputs(
    graph: nnx.GraphDef[Block], params: nnx.GraphState, h: jax.Array, embeddings: jax.Array
) -> jax.Array:
    return nnx.merge(graph, params)(h, embeddings=embeddings)


class Distances(NamedTuple):
    """Arrays [rows, T]: of the two predictions at every position, and of the target under each."""

    kl: Any  # nats
    tv: Any
    is_flip: Any
    reference_nll: Any  # nats
    candidate_nll: Any


def compare_predictions(
    reference: Computed, candidate: Computed, rows: Mapping[str, np.ndarray], *, batch_size: int
) -> Distances:
    """The distances on `rows` (tokens and targets [rows, T], one document to a row)."""
    parts = []
    heads = reference.model.head_weight(), candidate.model.head_weight()
    for index, count in batches(len(rows["tokens"]), batch_size):
        tokens, targets = rows["tokens"][index], rows["targets"][index]
        batch = distances(reference.hidden(tokens), candidate.hidden(tokens), *heads, targets)
        parts.append([np.asarray(x)[:count] for x in batch])
    return Distances(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@jax.jit
def distances(
    reference: Float[Array, "B T D"],
    candidate: Float[Array, "B T D"],
    reference_head: Float[Array, "V D"],
    candidate_head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
) -> Distances:
    """The distances of two predictions of the same tokens, from hidden states and heads.

    Log-softmax in float32 or better, in blocks of positions: never all logits at once.
    KL is summed as p (q/p - 1 - log(q/p)): no term is negative, and the rounding of a whole row's
    log-sum-exp, about 1e-6 nats, cancels.
    """

    def logs(hidden: jax.Array, head: jax.Array) -> jax.Array:
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        head = head.astype(hidden.dtype)
        return jax.nn.log_softmax(jnp.matmul(head, hidden, preferred_element_type=wide))

    def of_position(operands: tuple[jax.Array, ...]) -> Distances:
        h_reference, h_candidate, target = operands
        log_p, log_q = logs(h_reference, reference_head), logs(h_candidate, candidate_head)
        p, q, ratio = jnp.exp(log_p), jnp.exp(log_q), log_q - log_p
        near = p * (jnp.expm1(ratio) - ratio)
        terms = jnp.where(jnp.abs(ratio) < 1, near, q - p - p * ratio)
        is_flip = log_p.argmax() != log_q.argmax()
        tv = jnp.abs(p - q).sum() / 2
        return Distances(terms.sum(), tv, is_flip, -log_p[target], -log_q[target])

    flat = [x.reshape(targets.size, *x.shape[2:]) for x in (reference, candidate, targets)]
    block = max(1, min(targets.size, _LOGITS // len(reference_head)))
    result = jax.lax.map(of_position, tuple(flat), batch_size=block)
    return jax.tree.map(lambda x: x.reshape(targets.shape), result)


def summarize(found: Distances) -> Facts:
    """Means, quantiles and means by position, for JSON."""
    fields = {"flip_share" if name == "is_flip" else name: name for name in Distances._fields}

    def means(part: slice) -> Facts:
        return {name: _mean(getattr(found, field)[:, part]) for name, field in fields.items()}

    return means(slice(None)) | {
        "rows": len(found.kl),
        "tokens": found.kl.size,
        "kl": _spread(found.kl),
        "tv": _spread(found.tv),
        "by_position": [
            {"start": start, "stop": stop, "tokens": len(found.kl) * (stop - start)}
            | means(slice(start, stop))
            for start, stop in itertools.pairwise(bucket_edges(found.kl.shape[1]))
        ],
    }


def compare_answers(
    reference: Computed,
    candidate: Computed,
    task: str,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    *,
    length: int,
    batch_size: int,
) -> Facts:
    """Both scores of a task, and the share of samples that both ways answer alike, token by token
    up to the end of the document. `length`: the most tokens of bos, prompt and answer."""
    bos, num_new = [tokenizer.bos_id], TASKS[task].num_new
    prompts = [np.concatenate([bos, tokenizer.encode(x.prompt)]) for x in samples]
    draft = np.zeros((len(samples), num_new), np.int32)
    outputs: dict[Computed, list[np.ndarray]] = {}
    # A way with a state answers first: a draft that forward passes of the other confirm.
    for way in sorted((reference, candidate), key=lambda way: way.way.path == "forward"):
        parts = []
        for index, count in batches(len(samples), batch_size):
            written = way.greedy([prompts[i] for i in index], num_new, length, draft[index])
            parts.append(written[:count])
        draft = np.concatenate(parts)
        outputs[way] = [ids[: [*ids, tokenizer.eos_id].index(tokenizer.eos_id)] for ids in draft]

    def mean_score(way: Computed) -> float:
        texts = zip(outputs[way], samples, strict=True)
        return float(np.mean([score(tokenizer.decode(ids), x.outputs) for ids, x in texts]))

    return {
        "samples": len(samples),
        "reference_score": mean_score(reference),
        "candidate_score": mean_score(candidate),
        "identical_share": float(np.mean([*map(np.array_equal, *outputs.values())])),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64))


def _spread(values: np.ndarray) -> dict[str, float]:
    quantiles = np.quantile(values, list(QUANTILES.values()))
    return {"mean": _mean(values)} | dict(zip(QUANTILES, map(float, quantiles), strict=True))
