"""Faults of the kernels that `check` has to find before `VERIFIED` gets a GPU: each is applied to
the source, and a case of `check` that can see it runs, shortened, in Triton's interpreter.

Run as a program, the file prints the note of each fault's row, from a fork, which may crash.
"""

import importlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from devices import printed

KERNELS = Path(__file__).parents[2] / "kernels" / "ttcd_kernels"
DUAL, MERGE = "dual_window/triton_kernels.py", "decode/triton_kernels.py"
RULES, CALL = "dual_window/cotangents.py", "dual_window/triton_call.py"
TILES = "dual_window/tiles.py"
ONE, CONV, RESIDUAL = "decode/triton_call.py", "short_conv_kernels.py", "short_conv_call.py"
HALO, TURNED, PADDED, INNER = "257 of 301", "200, full/1", "131 of 333", "129 of 401"
DOCUMENTS, RING, BEGINNING = "4K 1024/512 documents", "300/100 H16/8", "300/1 H24"
PEAKED, SLICES, ROWS, LONG = "77 of 301", "5000/4999", "700/400", "2 x 514K"
NORMS = "2 x 3 x 67 F40, norms of 1e-6 documents"
SEES = "visible = visible & (ids_q[None, :] == ids_k[:, None])"
IN_ROW = " " * 12 + "position = row"
LSE = "peak + tl.log2(total)) * LN2"
# name: (case of check, file, what stands there, what is put there, ...)
FAULTS = {
    "sign of delta in dq": (TURNED, DUAL, "(d_weight - delta[:", "(d_weight + delta[:"),
    "far edge": (TURNED, DUAL, "(distance < reach[1])", "(distance <= reach[1])"),
    "width in dk, dv": (TURNED, DUAL, "< width.to(tl.uint32)", "< (width - 1).to(tl.uint32)"),
    "acc is not rescaled": (TURNED, DUAL, "acc = acc * shrink[:, None]", "acc = acc * 1.0"),
    "wrong group": (HALO, DUAL, "head // (N // K) * H", "head % K * H"),
    "documents dropped in dk, dv": (DOCUMENTS, DUAL, SEES, "visible = visible"),
    "padded columns loaded": (
        *(PADDED, DUAL, "q_ptr + at, mask=inside(is_row, H)", "q_ptr + at, mask=is_row[:, None]"),
        *("mask=inside(start + row < S, H)", "mask=(start + row < S)[:, None]"),
    ),
    "no guard of -inf": (
        *(HALO, DUAL, 'shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)'),
        "shift = new_peak",
    ),
    "halo dropped in the forward and dq": (HALO, DUAL, "row < T, row + (S - T)", "row < T, row"),
    "halo dropped in dk, dv": (HALO, DUAL, f"{IN_ROW} + (S - T)", IN_ROW),
    "sign of a negative scale": (TURNED, CALL, "jnp.asarray(np.sign(scale),", "jnp.asarray(1,"),
    "cotangents of lse ignored": (TURNED, RULES, " - d_teacher_lse", "", " - d_student_lse", ""),
    "rho = 1": (TURNED, RULES, "jnp.exp(student_lse - teacher_lse)", "jnp.ones_like(teacher_lse)"),
    "offsets of 32 bit": (LONG, DUAL, "(tl.cast(batch, tl.int64) * T + tile", "(batch * T + tile"),
    "lse + ln 2 in decode": (RING, MERGE, LSE, LSE.replace(")) *", ") + 1.0) *")),
    "ring off by one": (RING, MERGE, "slot < 0, slot + W, slot", "slot < 0, slot + W - 1, slot"),
    "slot before the beginning": (BEGINNING, MERGE, "(stop, position + 1)", "(stop, position + 2)"),
    "last far slice dropped": (RING, MERGE, "else num_slices", "else num_slices - 1"),
    "inner tiles too near": (INNER, TILES, "first - nearest + 1\n", "last - nearest + 1\n"),
    "tiles of the first row": (DOCUMENTS, DUAL, "tl.program_id(2) * tl.num_programs(0) * 8", "0"),
    "a document never again": (DOCUMENTS, TILES, "jnp.where(is_ordered, start, 0)", "start"),
    "no largest score": (PEAKED, DUAL, "tl.max(score, 1) * scale_log2", "0.0"),
    "sign of decode's scale": (SLICES, ONE, "(windows.scale * launch", "(-windows.scale * launch"),
    "acc is not rescaled in decode": (ROWS, MERGE, "acc * shrink[:, None], input", "acc, input"),
    "slices merged at once": (SLICES, MERGE, "piece = start + tl", "piece = first + tl"),
    "segments of the first chunk": (NORMS, CONV, "ids_ptr + tokens", "ids_ptr"),
    "smallest norm": (NORMS, "normalize.py", "NORM_EPS = 1e-6", "NORM_EPS = 1e-3"),
    "slope at zero": (NORMS, RESIDUAL, "norm, 1), zero_slope)", "norm, 1), 1.0)"),
}


def test_check_finds_every_fault_and_none_where_there_is_none():
    for name, (_, file, *edits) in FAULTS.items():
        text = (KERNELS / file).read_text()
        assert all(old in text for old in edits[::2]), (
            f"{name}: {file} has changed, and this has to"
        )
    notes = [json.loads(x) for x in printed(__file__, count=1, TRITON_INTERPRET="1").splitlines()]
    sound = {name: note for name, note in notes if name not in FAULTS}
    assert sound == dict.fromkeys(sorted({case for case, *_ in FAULTS.values()}), "passed")
    found = {name: note for name, note in notes if name in FAULTS}
    crashed = {name for name, note in found.items() if not note.startswith("failed: error")}
    assert crashed <= {"offsets of 32 bit"}, found
    assert len(found) == len(FAULTS) == 28


def _note(case_name, file=None, edits=()):
    """The note of the row of a case of `check`, of sources in which a file is edited."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(KERNELS, f"{folder}/ttcd_kernels")
        if file is not None:
            path = Path(folder, "ttcd_kernels", file)
            text = path.read_text()
            for old, new in zip(edits[::2], edits[1::2], strict=True):
                text = text.replace(old, new)
            path.write_text(text)
        sys.path.insert(0, folder)
        for name in [x for x in sys.modules if x.partition(".")[0] == "ttcd_kernels"]:
            del sys.modules[name]
        import triton_interpreter
        from ttcd_kernels import launch

        from experiments.studies.kernels import attention, convolution, decoding

        assert launch.__file__.startswith(folder)
        triton_interpreter.install()
        name, is_cut = case_name.removesuffix(" documents"), case_name.endswith(" documents")
        op, case = next(
            (op, case)
            for op in (attention, decoding, convolution)
            for case in op.SHAPES["check"]
            if case.name.startswith(name) and getattr(case, "has_documents", False) == is_cut
        )
        if case_name == LONG:
            return _of_last_program(case._replace(dtype="float16"))
        return triton_interpreter.note(op, *_shortened(op, case))


def _forked(*way):
    """A file of the note that another process writes; of none if it crashes."""
    read, write = os.pipe()
    if not os.fork():
        signal.alarm(100)
        try:
            note = _note(*way)
        except Exception:  # noqa: BLE001
            note = traceback.format_exc()
        os.write(write, (note or "passed").encode())
        os.kill(os.getpid(), signal.SIGKILL)  # nothing of JAX is torn down
    os.close(write)
    return os.fdopen(read)


def _shortened(op, case):
    """By a factor of eight or 32, with a tile of 16 queries and 8 keys or of 32 and 16."""
    sizes = ("length", "num_keys", "teacher_window", "student_window", "num_slots")
    sizes = {x: getattr(case, x, None) for x in sizes}
    factor = 8 if (sizes["length"] or 0) < 4000 else 32
    sizes = {name: max(size // factor, 1) for name, size in sizes.items() if size is not None}
    if hasattr(case, "num_slots"):
        sizes |= {"num_heads": case.num_heads // case.num_kv_heads, "num_kv_heads": 1}
        sizes |= {"batch": min(case.batch, 9)}
        tile = 16, 4, 2, 1 if case.batch > 9 else 50 * case.batch
    else:
        sizes |= {"batch": 1 + case.has_documents}
        tile = (16, 8, 4, 2) if factor == 8 else (32, 16, 4, 2)
    tile = op.tuning.Tile(*tile) if hasattr(op, "tuning") else None
    return case._replace(dtype="float32", **sizes), tile


def _of_last_program(case):
    """The forward's last program alone, on arrays of which only the last rows are in memory."""
    import numpy as np
    import triton_interpreter
    from ttcd_kernels.dual_window import tiles, triton_kernels
    from ttcd_kernels.launch import LOG2E

    from experiments.studies.kernels import definition, programs

    shape, block = (case.batch, case.length, case.num_heads, case.head_dim), 16
    assert np.prod(shape) > 2**31
    q, teacher, student = (np.zeros(shape, np.float16) for _ in range(3))
    k, v = (np.zeros((*shape[:2], case.num_kv_heads, shape[3]), np.float16) for _ in range(2))
    lses = [np.zeros((case.batch, case.num_heads, case.length), np.float32) for _ in range(2)]
    far, rng = block + case.teacher_window - 1, np.random.default_rng(0)
    for x in (q, k, v):
        x[-1, -far:] = rng.standard_normal(x[-1, -far:].shape)
    windows = case.windows
    visited = np.array(tiles.visits(tiles.bands(windows), *shape[1:2] * 2, block, block))
    last = visited.shape[1] - 1, case.num_heads - 1, case.batch - 1
    builder = triton_interpreter.module.interpreter_builder
    builder.set_grid_dim(*(index + 1 for index in last))
    builder.set_grid_idx(*last)
    builder.set_grid_dim = builder.set_grid_idx = lambda *_: None
    tensor = triton_interpreter._host_tensor
    sizes = case.length, case.length, case.num_heads, case.num_kv_heads, *windows[:2]
    arrays = [*map(tensor, (q, k, v, q, visited))]
    results = [*map(tensor, (teacher, student, *lses))]
    constants = {"H": shape[3], "BLOCK_M": block, "BLOCK_N": block, "HAS_SEGMENTS": False}
    triton_kernels.dual_window_forward[(1, 1, 1)](
        *arrays, *sizes, windows.scale * LOG2E, *results, PRECISION="ieee", **constants
    )
    q, k, v = (x[-1:, -n:, -1:].astype(float) for x, n in ((q, block), (k, far), (v, far)))
    nothing = (np.zeros_like(q), np.zeros_like(q), q[..., 0], q[..., 0])
    expected = definition.dual_window(q, k, v, *nothing, ids=None, windows=windows)[:2]
    found = (x[-1:, -block:, -1:] for x in (teacher, student))
    errors = map(programs.relative_error, found, expected)
    return "" if all(x <= programs.BOUNDS["float16"] for x in errors) else "failed: rows differ"


if __name__ == "__main__":
    for module in ("jax", "jax.experimental.pallas", "triton.language", "ttcd_jax.commands"):
        importlib.import_module(module)
    ways = {case: (case,) for case in sorted({case for case, *_ in FAULTS.values()})}
    ways |= {name: (case, file, edits) for name, (case, file, *edits) in FAULTS.items()}
    chosen = sys.argv[1:] or ways
    for names in itertools.batched(chosen, 2):
        for name, notes in [(name, _forked(*ways[name])) for name in names]:
            print(json.dumps([name, notes.read() or "crashed"]), flush=True)
            os.wait()
