"""Decode attention: the kernel by Triton's interpreter and ahead of time, the XLA form, rings
against whole sequences, a mesh, and refusals.

Run as a program, the file prints the measurements of the mesh test: a mesh needs its own devices.
"""

import inspect
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, distance, draw
from devices import COLLECTIVES, printed
from interpreting import check_errors
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ttcd_kernels import dual_window_attention_with_lse, launch
from ttcd_kernels.decode import bench, reference, triton_call, xla
from ttcd_kernels.decode.api import decode_attention, decode_attention_with_lse
from ttcd_kernels.decode.bench import SHAPES, compile_step
from ttcd_kernels.decode.tuning import HEAD_DIMS, TABLE, Slices, Tuning, slices_for, tuning_for
from ttcd_kernels.windows import Windows

# A row that waits, the beginning, both windows' ends, the ring's edge, far beyond.
PHASES = [-1, 0, 5, 19, 20, 47, 48, 52, 53, 54, 110, 2_000_000_011]
BASE = {
    **{"positions": [7, 60, 1_000_003], "N": 4, "K": 2, "H": 32, "W": 53},
    **{"teacher": 48, "student": 20, "slices": 2, "block_n": 16},
}
CASES = [
    # phases
    BASE | {"positions": PHASES, "K": 1, "N": 2},
    # rings
    BASE | {"W": 48, "slices": 4},  # full
    BASE | {"W": 1, "teacher": 1, "student": 1},
    BASE | {"W": 100, "teacher": 33, "student": 16, "block_n": 32},
    # groups
    *[BASE | {"N": group, "K": 1, "positions": [70]} for group in (1, 2, 3, 17)],
    # windows
    BASE | {"student": 48, "slices": 1},
    BASE | {"student": 1},
    BASE | {"student": 47, "slices": 5},
    BASE | {"teacher": 50, "student": 18, "slices": 4},
    # transforms
    *[
        BASE | {"transform": name, "positions": [7, 90]}
        for name in ("jit", "vmap", "vmap, shared caches")
    ],
    # public
    BASE | {"is_public": True, "H": 128},
    # narrow
    *[BASE | {"dtype": dtype} for dtype in ("bfloat16", "float16")],
]
# A relative step of each dtype; sums over up to 60 keys, probabilities rounded once.
BOUND = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


def test_the_kernel_computes_the_definition():
    check_errors("decode", CASES, BOUND, "teacher_lse", "student_lse")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code_is_one_kernel_without_spills(capability, head_dim):
    (kernel,), launched = compile_step(capability, head_dim)
    assert launched == [kernel.name] == ["decode_attention"]
    assert kernel.spill_bytes == 0
    assert kernel.tensor_core_instructions > 0
    # Two programs share a multiprocessor, with two tiles of K and V each under way.
    shared_limit = {80: 163 * 1024, 90: 227 * 1024}[capability]
    tile = 2 * head_dim * tuning_for(capability, head_dim, 2).block_n
    assert 4 * tile <= kernel.shared_bytes <= shared_limit // 2
    assert kernel.registers <= 65_536 // (2 * 4 * 32)


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "num_heads": 64, "num_kv_heads": 1},
        {"dtype": "float16", "num_heads": 17, "num_kv_heads": 1},
        {"num_heads": 64, "num_kv_heads": 1},
        # Scalars that are 1 become constants of the kernel.
        {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "teacher_window": 1, "student_window": 1},
    ],
)
def test_unusual_shapes_compile_without_spills(facts):
    (kernel,), _ = compile_step(90, 128, **facts)
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= 227 * 1024


def test_slices_fill_the_gpu_and_no_more():
    tuning = Tuning(64, 4, 3, num_programs=264)
    assert slices_for(tuning, 8, 8192, 4096) == Slices(256, 16, 16)
    assert slices_for(tuning, 8, 8192, 7936) == Slices(256, 31, 1)
    assert slices_for(tuning, 512, 8192, 4096) == Slices(4096, 1, 1)
    assert slices_for(tuning, 1, 2048, 2048) == Slices(64, 32, 0)
    assert slices_for(tuning, 1, 3, 1) == Slices(64, 1, 1)


def test_the_table_knows_every_head_dim_and_older_and_newer_gpus():
    assert {dim for _, dim in TABLE} == set(HEAD_DIMS)
    for dim in HEAD_DIMS:
        assert tuning_for(86, dim, 2) == TABLE[80, dim]
        assert tuning_for(100, dim, 2) == TABLE[90, dim]
        assert tuning_for(100, dim, 4).block_n == TABLE[90, dim].block_n // 2


def _rings(positions, N, K, W, dtype=None):
    """q, k_cache, v_cache, position of heads of 8."""
    B = len(positions)
    arrays = draw(0, (B, N, 8), (B, W, K, 8), (B, W, K, 8), dtype=dtype)
    return *arrays, jnp.asarray(positions, jnp.int32)


@pytest.mark.parametrize(("teacher", "student"), [(48, 20), (53, 53), (2, 1), (1, 1)])
@pytest.mark.parametrize(("N", "K"), [(2, 2), (6, 2), (17, 1)])
def test_xla_computes_the_definition(teacher, student, N, K, float64):
    operands = _rings(PHASES, N, K, 53)
    scale = 0.7 if K == 2 else 300.0  # scores whose exponentials overflow
    options = {"teacher_window": teacher, "student_window": student, "scale": scale}
    ours = decode_attention_with_lse(*operands, implementation="xla", **options)
    theirs = decode_attention_with_lse(*operands, implementation="reference", **options)
    waiting = tuple(x[:1] for x in ours)
    assert_same(waiting, tuple(x[:1] for x in theirs))
    assert not np.any(waiting[0])
    assert np.all(np.isneginf(waiting[2]))
    assert_close(tuple(x[1:] for x in ours), tuple(x[1:] for x in theirs))


@pytest.mark.parametrize("form", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_results_are_near_those_of_float64(form, dtype):
    operands = _rings([3, 70], 4, 2, 24, dtype)
    options = {"teacher_window": 24, "student_window": 9}
    with jax.enable_x64(True):
        wide = (jnp.asarray(x, jnp.float64) for x in operands[:3])
        expected = decode_attention_with_lse(*wide, operands[3], implementation="xla", **options)
    found = decode_attention_with_lse(*operands, implementation=form, **options)
    assert [x.dtype.name for x in found] == [dtype, dtype, "float32", "float32"]
    assert all(distance(x, y) < BOUND[dtype] for x, y in zip(found[:2], expected[:2], strict=True))
    assert all(
        distance(x, y) < BOUND["float32"] for x, y in zip(found[2:], expected[2:], strict=True)
    )


@pytest.mark.parametrize("form", ["xla", "reference"])
@pytest.mark.parametrize("num_slots", [12, 17])
def test_decoding_position_by_position_equals_the_whole_sequence(num_slots, form):
    """Rows start at different positions of their sequences, so their rings are in other phases."""
    T, N, K, H, rows = 40, 4, 2, 8, np.arange(2)
    q, k, v = draw(1, (2, T, N, H), (2, T, K, H), (2, T, K, H))
    windows = {"teacher_window": 12, "student_window": 5}
    whole = dual_window_attention_with_lse(q, k, v, implementation="xla", **windows)
    lead = jnp.asarray([0, 7])  # the second row has seen seven tokens when the first has seen none
    empty = jnp.full((2, num_slots, K, H), 1e3)  # no zeros: unwritten slots must not count

    def write(caches, position):
        slot = rows, position % num_slots
        return caches[0].at[slot].set(k[rows, position]), caches[1].at[slot].set(v[rows, position])

    def step(caches, t):
        position = (t + lead).astype(jnp.int32)
        caches = write(caches, position)
        out = decode_attention_with_lse(
            q[rows, position], *caches, position, implementation=form, **windows
        )
        return caches, out

    def prefix(x, cache):
        return cache.at[1, jnp.arange(7)].set(x[1, :7])

    caches = prefix(k, empty), prefix(v, empty)
    _, steps = jax.jit(partial(jax.lax.scan, step))(caches, jnp.arange(T - 7))
    for found, expected in zip(steps, whole, strict=True):
        assert_close(found[:, 0], expected[0, : T - 7])
        assert_close(found[:, 1], expected[1, 7:])


@pytest.mark.parametrize("form", ["triton", "xla", "reference"])
def test_a_gradient_is_refused(form):
    q, k, v, position = _rings([3, 4], 2, 2, 8, "float32")
    q, k, v = (jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, 24),)) for x in (q, k, v))

    def loss(q):
        results = decode_attention(
            q, k, v, position, teacher_window=8, student_window=4, implementation=form
        )
        return sum(x.sum() for x in results)

    with launch.compiling_for(90), pytest.raises(ValueError, match="is not differentiable"):
        jax.jit(jax.grad(loss))(q)


def _call(q=(2, 4, 8), k=(2, 16, 2, 8), v=None, position=(2,), **options):
    """The call as users make it: the suite's type checker would refuse some before the library."""
    options = {"teacher_window": 16, "student_window": 8} | options
    dtype = options.pop("position_dtype", jnp.int32)
    return inspect.unwrap(decode_attention_with_lse)(
        *(jnp.zeros(shape) for shape in (q, k, v or k)), jnp.zeros(position, dtype), **options
    )


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"v": (2, 16, 1, 8)}, ["k_cache has shape (2, 16, 2, 8)", "(2, 16, 1, 8)"]),
        ({"q": (2, 4, 4)}, ["(2, 4, 4)", "(2, 16, 2, 8)", "head dimension"]),
        ({"q": (2, 3, 8)}, ["2 kv heads do not divide 3 query heads"]),
        ({"k": (3, 16, 2, 8)}, ["q has 2 rows and the cache 3"]),
        ({"position": (3,)}, ["position has shape (3,)", "2 queries need (2,)"]),
        ({"position": ()}, ["position has shape ()", "2 queries need (2,)"]),
        ({"position_dtype": jnp.float32}, ["position is float32", "int32"]),
        ({"student_window": 0}, ["student_window is 0", "at least 1"]),
        ({"student_window": 17}, ["student_window 17", "teacher_window 16"]),
        ({"teacher_window": 20}, ["16 slots", "20 positions"]),
        ({"implementation": "cudnn"}, ["'cudnn'", "auto, triton, xla, reference"]),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(arguments, facts):
    with pytest.raises(ValueError, match=re.escape(facts[0])) as caught:
        _call(**arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert all(fact in message for fact in facts)


def test_what_the_kernel_cannot_take_is_refused_before_launch():
    triton = {"implementation": "triton"}
    with launch.compiling_for(90):
        with pytest.raises(ValueError, match=r"head dim 8 is not one of 32, 64, 128"):
            _call(**triton)
        with pytest.raises(ValueError, match=r"65 query heads per kv head are more than 64"):
            _call(q=(2, 65, 32), k=(2, 16, 1, 32), **triton)
        with jax.enable_x64(True), pytest.raises(ValueError, match="float64, float64, float64"):
            _call(q=(2, 4, 32), k=(2, 16, 2, 32), **triton)
    if jax.default_backend() != "gpu":
        with pytest.raises(ValueError, match="no GPU: the backend is cpu"):
            _call(q=(2, 4, 32), k=(2, 16, 2, 32), **triton)
        assert [x.shape for x in _call()] == [(2, 4, 8)] * 2 + [(2, 4)] * 2


@pytest.mark.parametrize("case", SHAPES["tiny"], ids=lambda case: case.name)
def test_the_benchmarked_programs_agree(case):
    arrays = [draw(0, shape.shape, dtype=shape.dtype)[0] for shape in bench.operand_shapes(case)]
    programs = bench.programs(case)
    expected = programs["forward", "reference"](*arrays)
    assert_close(programs["forward", "xla"](*arrays), expected)
    assert_close(bench._stock(case, *arrays), expected)


def test_the_work_counts_both_products_and_each_key_once():
    case = next(case for case in SHAPES["paper"] if case.batch == 8 and case.head_dim == 128)
    assert bench.work(case, "forward") == (
        4 * 8 * 16 * 128 * 8192,
        2 * (2 * 8 * 8192 * 8 * 128 + 3 * 8 * 16 * 128),
    )


def _mesh_measure() -> dict[str, object]:
    """A mesh with the definition in place of the launch: JAX cannot run the interpreter's callback
    inside a partitioned call."""
    queries = []  # the shape in each launch, the last one when a device's part is compiled

    def definition(windows, _, *arrays):
        queries.append(arrays[0].shape)
        return reference.decode(*arrays, windows)

    triton_call._launch = definition
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 4, 32), (2, 24, 2, 32), (2, 24, 2, 32)
    arrays = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
    operands = *arrays, jnp.asarray([30, 11], jnp.int32)
    specs = ("data", "tensor"), *[("data", None, "tensor")] * 2, ("data",)
    shardings = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
    windows = Windows(16, 8, 0.2)
    with launch.compiling_for(90):
        run = jax.jit(partial(triton_call.decode, windows=windows), in_shardings=shardings)
        program = str(run.lower(*operands).compile().as_text())
        found, expected = run(*operands), xla.decode(*operands, windows)
    return {
        "launched": queries[-1],
        "collectives": [name for name in COLLECTIVES if name in program],
        "distance": max(float(jnp.abs(x - y).max()) for x, y in zip(found, expected, strict=True)),
        "shards": [x.addressable_shards[0].data.shape for x in found],
    }


def test_a_mesh_splits_batch_and_kv_heads_and_moves_nothing():
    found = json.loads(printed(__file__))
    assert found["launched"] == [1, 2, 32]
    assert found["collectives"] == []
    assert found["distance"] <= 1e-5
    assert found["shards"] == [[1, 2, 32], [1, 2, 32], [1, 2], [1, 2]]


if __name__ == "__main__":
    print(json.dumps(_mesh_measure()))
