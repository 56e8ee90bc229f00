"""Definitions, slow and obvious: full masks and loops in plain jnp, which programs can contain.

Those of the kernels' ops, with their gradients, are experiments/studies/kernels/definition.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ttcd_kernels.windows import Windows

from ttcd_jax.nn.linear import newton_schulz
from ttcd_jax.nn.rope import rotate


def single_window(q, k, v, segment_ids, window: int, scale: float):
    """q [B, T, N, H], k and v [B, S, K, H] -> out [B, T, N, H], log-sum-exp [B, T, N]."""
    B, T, N, H = q.shape
    S, K = k.shape[1], k.shape[2]
    q_BTKGH = q.reshape(B, T, K, N // K, H)
    score = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k, precision="highest") * scale
    query_pos, key_pos = jnp.arange(T)[:, None] + (S - T), jnp.arange(S)[None, :]
    visible = (query_pos >= key_pos) & (query_pos - key_pos < window)
    if segment_ids is not None:
        same = segment_ids[:, S - T :, None] == segment_ids[:, None, :]
        visible = visible & same[:, None, None]
    score = jnp.where(visible, score, -jnp.inf)
    lse = jax.nn.logsumexp(score, axis=-1)
    weight = jnp.exp(score - lse[..., None])
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weight, v, precision="highest").reshape(B, T, N, H)
    return out, lse.transpose(0, 3, 1, 2).reshape(B, T, N)


def dual_window(q, k, v, segment_ids, windows: Windows):
    """(teacher out, student out, teacher lse, student lse), each by its own full softmax, in the
    operands' dtype throughout."""
    teacher, teacher_lse = single_window(q, k, v, segment_ids, windows.teacher, windows.scale)
    if windows.student == windows.teacher:
        return teacher, teacher, teacher_lse, teacher_lse
    student, student_lse = single_window(q, k, v, segment_ids, windows.student, windows.scale)
    return teacher, student, teacher_lse, student_lse


def norm(x, weight, eps=1e-6):
    return weight * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps)


def layer(config, rows, number, sinks, ids, window, h):
    """Of a plain layer whose parameters are among `rows`, by their names on disk, for a stream h
    [T, D] of documents, `ids` [T] numpy: the stream after it; the normed input, the features and
    the output of its MLP. A query also sees the first `sinks` tokens of its document."""
    p = {x.removeprefix(f"layers/{number}/"): rows[x] for x in rows}
    x, size, place = norm(h, p["mixer_norm"]), config.head_size, jnp.arange(len(h))
    begin = np.array([np.flatnonzero(ids == document)[0] for document in ids])
    near = place[:, None] - place < (window or len(h))
    near |= place - begin[:, None] < sinks
    is_seen = near & (ids[:, None] == ids) & (place <= place[:, None])
    q, k, v = ((x @ p[f"mixer/{y}"]).reshape(len(h), -1, size) for y in ("query", "key", "value"))
    q, k = (rotate(heads[None], (place - begin)[None], config.rope)[0] for heads in (q, k))
    score = jnp.einsum("TNH,SNH->NTS", q, k) / jnp.sqrt(size)
    weight = jax.nn.softmax(jnp.where(is_seen, score, -jnp.inf))
    h = h + jnp.einsum("NTS,SNH->TNH", weight, v).reshape(len(h), -1) @ p["mixer/out"]
    x = norm(h, p["mlp_norm"])
    z = jax.nn.silu(x @ p["mlp/gate"]) * (x @ p["mlp/up"])
    return h + z @ p["mlp/down"], x, z, z @ p["mlp/down"]


class Read(NamedTuple):
    """How a token reads: its features, what its error compares, and the weight of its chunk."""

    z_out: jax.Array
    teacher: jax.Array
    student: jax.Array
    weight: jax.Array  # W_base and what the memory holds
    has_memory: bool  # an earlier chunk has tokens of its document


def in_place(settings, params: dict, x, t, ids):
    """(y [T, D], the weight after the row) of one row of an in-place MLP (IP-TTCD, the ideal one,
    IP-TTT if `settings` have a target), token by token. x, t [T, D]; ids [T] numpy, in runs."""
    reads, end = in_place_reads(settings, params, x, t, ids)
    return jnp.stack([read.z_out @ read.weight for read in reads]), end


# Without a gap the errors are those of a student that sees what the teacher sees.
def in_place_reads(settings, params, x, t, ids, has_gap=True) -> tuple[list[Read], jax.Array]:
    T, w, document = len(x), params["down"], ids if settings.resets_at_document else 0 * ids
    is_target, is_ideal = hasattr(settings, "target"), not hasattr(settings, "has_proj")
    corrects = not is_ideal and settings.corrects_errors

    def features(h):
        return jax.nn.silu(h @ params["gate"]) * (h @ params["up"])

    def convolved(vectors, name, p):
        if name not in params:
            return vectors[p]
        return conv_at(settings, document, vectors, params[name], p)

    def read_and_written(p) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
        """(features that read, of teacher, of student), (key, error, rate of the correction)."""
        if is_target:
            z_out = convolved(z, "activation_conv", p)
            key = _unit(z_out) if corrects else z_out
            error, rate, views = convolved(t, "target_conv", p), 1.0, (z_out, z_out)
        else:
            teacher, student = convolved(z, "teacher_conv", p), convolved(z_s, "student_conv", p)
            views = teacher, student
            if is_ideal:
                return (teacher, *views), (student, None, None)
            z_out = {"teacher": teacher, "teacher_raw": z[p], "student": student}[settings.output]
            key = _unit(student) if settings.normalizes_keys else student
            near = z_s if has_gap else z
            seen = convolved(near, "student_conv", p)
            error = _made(settings, params, teacher, seen, z[p], near[p])
            view = {"student": t, "teacher": x}[settings.gate][p]
            gate = (view @ params["rate"]) if "rate" in params else jnp.inf
            error = (rate := 1 / (1 + jnp.exp(-gate))) * error
        error = error @ params["proj"] if "proj" in params else error
        return (z_out, *views), (key, error, rate)

    z, z_s = ([features(h[p]) for p in range(T)] for h in (x, t))
    found, reads = [read_and_written(p) for p in range(T)], {}
    states = {d: (w, jnp.zeros_like(w), 0) for d in document.tolist()}
    for first in range(0, T, settings.chunk_size):
        chunk = range(first, min(first + settings.chunk_size, T))
        for d in dict.fromkeys(document[p] for p in chunk):
            own = [p for p in chunk if document[p] == d]
            base, total, count = states[d]
            weight = _held(settings, w, base + settings.eta * total)
            reads |= {p: Read(*found[p][0], weight, count > 0) for p in own}
            left, delta = sum(_log_left(settings, params, x[p]) for p in own), jnp.zeros_like(w)
            total = total * jnp.exp(left)
            for p in own:
                (_, teacher, student), (key, error, rate) = found[p]
                if is_ideal:  # the gradient of the distillation loss, of which the teacher has none
                    target = jax.lax.stop_gradient(teacher @ weight)
                    error = (target - student @ weight) / len(own) * has_gap
                if corrects:
                    error = error - rate * (key @ (total + delta))
                delta = delta + key[:, None] * error[None, :]
            if getattr(settings, "orthogonalizes_updates", False):
                delta = newton_schulz(delta)
            states[d] = _ended(settings, w, base, total + delta, count + 1)
    base, total, _ = states[document[-1]]
    return [reads[p] for p in range(T)], _held(settings, w, base + settings.eta * total)


def _made(settings, params, teacher, student, z, z_s):
    """The error before gate and P."""
    found = {"difference": teacher - student, "gap": z - z_s}
    found |= {"teacher": teacher, "student": student, "learned": z}
    error = found[settings.error] @ params["value" if settings.error == "learned" else "down"]
    return _unit(error) if settings.normalizes_errors else error


def conv_at(settings, document, vectors, taps, p):
    """Of token p, inside its chunk and document."""
    total = jnp.zeros_like(vectors[p])
    for r, tap in enumerate(taps):
        s = p + r - (len(taps) - 1 if settings.is_conv_causal else len(taps) // 2)
        is_near = 0 <= s < len(vectors) and s // settings.chunk_size == p // settings.chunk_size
        if is_near and document[s] == document[p]:
            total = total + tap * vectors[s]
    return total


def _unit(v):
    return v / jnp.sqrt((v * v).sum())


def _log_left(settings, params, x):
    """[D]: the logarithm of what the token x leaves of every column."""
    rates, half_lives = [], getattr(settings, "half_lives", ())
    for q, half_life in enumerate(half_lives):
        rate = jnp.log(2.0) / half_life
        if settings.decay != "constant":
            rate = rate * jnp.exp(params["decay"][q])
        if settings.decay == "gated":
            rate = rate * jnp.log1p(jnp.exp(x @ params["decay_gate"][:, q])) / jnp.log(2.0)
        rates += [rate] * (len(x) // len(half_lives))
    return -jnp.stack(rates) if rates else jnp.zeros(len(x))


def _held(settings, w, weight):
    """The weight at the size of W_base, where `renorm_chunks` holds it there."""
    if getattr(settings, "renorm_chunks", None) is None:
        return weight
    return weight * jnp.sqrt((w * w).sum() / (weight * weight).sum())


def _ended(settings, w, base, total, count):
    """The state after a chunk."""
    group = getattr(settings, "renorm_chunks", None)
    if group is None or count % group:
        return base, total, count
    return _held(settings, w, base + settings.eta * total), jnp.zeros_like(total), count
