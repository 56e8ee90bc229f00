import subprocess
import sys

import pytest
from devices import environment

from ttcd_jax.sharding.collectives import Collective, collectives

# Eight devices of a CPU, in a process of their own: every function of `SENT` prints what it sends,
# by the text after partitioning and by the optimized one.
SCRIPT = """
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from ttcd_jax.sharding.collectives import collectives, compile_partitioned

AXES = ("data", "fsdp", "seq", "tensor")
mesh = jax.make_mesh((2, 2, 2, 1), AXES, axis_types=(AxisType.Auto,) * 4)
lax = jax.lax

def show(name, function, x, specs=(P(), P())):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs[0], out_specs=specs[1],
                           check_vma=False)
    compiled, text = compile_partitioned(jax.jit(mapped).lower(x))
    found = collectives(text, mesh.shape)
    assert name == "bfloat16" or found == collectives(compiled.as_text(), mesh.shape), name
    print(repr((name, [tuple(one) for one in found])))

def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)

def repeated(function, rounds):
    return lambda x: lax.scan(lambda c, _: (function(c), None), x, None, length=rounds)[0]

def shift(x):
    return lax.ppermute(x, "seq", [(0, 1)]) * 2

for axis in AXES:
    show("all-reduce " + axis, lambda x: lax.psum(x, axis), array(16, 8))
show("all-reduce of two axes", lambda x: lax.psum(x, ("data", "seq")), array(16, 8))
show("all-reduce of all", lambda x: lax.psum(x, AXES), array(16, 8))
show("bfloat16", lambda x: lax.psum(x, "data"), array(16, 8, dtype=jnp.bfloat16))
show("all-gather", lambda x: lax.all_gather(x, "fsdp", tiled=True), array(16, 8))
show("reduce-scatter", lambda x: lax.psum_scatter(x, ("data", "fsdp"), tiled=True), array(16, 8))
show("all-to-all", lambda x: lax.all_to_all(x, ("fsdp", "seq"), 0, 1, tiled=True), array(16, 8))
show("permute", shift, array(16, 8))
show("permute of nobody", lambda x: lax.ppermute(x, "tensor", []) + x, array(16, 8))
show("loop", repeated(shift, 5), array(16, 8))
show("nested loops", repeated(lambda x: lax.psum(repeated(shift, 3)(x), "fsdp") / 2, 5),
     array(16, 8))
show("branches", lambda x: lax.cond(x[0, 0] > 0, shift, lambda x: lax.psum(x, "data"), x),
     array(16, 8))

# A gradient whose parameter lies in parts: an all-reduce of which each device keeps a slice.
def place(*axes):
    return NamedSharding(mesh, P(*axes))

def loss(w, x):
    return jnp.sum(jnp.tanh(x @ lax.with_sharding_constraint(w, place())))

inputs = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(axis))
          for shape, axis in (((16, 8), "fsdp"), ((32, 16), "fsdp"))]
lowered = jax.jit(jax.grad(loss), out_shardings=place("fsdp")).lower(*inputs)
print(repr(("gradient", [tuple(one)
      for one in collectives(compile_partitioned(lowered)[1], mesh.shape)])))
lowered = jax.jit(lambda x: jnp.sqrt(jnp.sum(x * x))).lower(inputs[0])
print(repr(("norm", [tuple(one)
      for one in collectives(compile_partitioned(lowered)[1], mesh.shape)])))
"""
SIZE = 16 * 8 * 4  # bytes of every array
SENT = {
    "all-reduce data": [("all-reduce", SIZE, 2, ("data",), 1)],
    "all-reduce fsdp": [("all-reduce", SIZE, 2, ("fsdp",), 1)],
    "all-reduce seq": [("all-reduce", SIZE, 2, ("seq",), 1)],
    "all-reduce tensor": [],
    "all-reduce of two axes": [("all-reduce", 2 * SIZE * 3 // 4, 4, ("data", "seq"), 1)],
    "all-reduce of all": [("all-reduce", 2 * SIZE * 7 // 8, 8, ("data", "fsdp", "seq"), 1)],
    "bfloat16": [("all-reduce", SIZE // 2, 2, ("data",), 1)],
    "all-gather": [("all-gather", SIZE, 2, ("fsdp",), 1)],
    "reduce-scatter": [("reduce-scatter", SIZE * 3 // 4, 4, ("data", "fsdp"), 1)],
    "all-to-all": [("all-to-all", SIZE * 3 // 4, 4, ("fsdp", "seq"), 1)],
    "permute": [("collective-permute", SIZE, 2, ("seq",), 1)],
    "permute of nobody": [],
    "loop": [("collective-permute", SIZE, 2, ("seq",), 5)],
    "nested loops": [
        ("collective-permute", SIZE, 2, ("seq",), 15),
        ("all-reduce", SIZE, 2, ("fsdp",), 5),
    ],
    "branches": [
        ("all-reduce", SIZE, 2, ("data",), 1),
        ("collective-permute", SIZE, 2, ("seq",), 1),
    ],
    # Whole for the product, and of its gradient's sum each device keeps half.
    "gradient": [
        ("all-gather", SIZE // 2, 2, ("fsdp",), 1),
        ("reduce-scatter", SIZE // 2, 2, ("fsdp",), 1),
    ],
    "norm": [("all-reduce", 4, 2, ("fsdp",), 1)],
}


@pytest.fixture(scope="module")
def found():
    script = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert script.returncode == 0, script.stderr
    return dict(eval(line) for line in script.stdout.splitlines())


@pytest.mark.parametrize("name", SENT)
def test_what_a_program_sends_is_read_from_its_text(found, name):
    assert found[name] == SENT[name]


MESH = {"data": 2, "fsdp": 4}


def _program(*lines, devices=8, called=()):
    """`called`: the lines of further computations, headers and closing braces included."""
    return "\n".join(
        [
            f"HloModule jit_f, num_partitions={devices}",
            "ENTRY %main (x: f32[4,8]) -> f32[4,8] {",
            *(f"  {line}" for line in ("%x = f32[4,8]{1,0} parameter(0)", *lines)),
            "}",
            *called,
        ]
    )


def _reduced(groups):
    line = f"ROOT %y = f32[4,8]{{1,0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
    called = ("%add (a: f32[]) -> f32[] {", "  ROOT %a = f32[] parameter(0)", "}")
    return _program(line, called=called)


@pytest.mark.parametrize(
    ("groups", "size", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4, ("fsdp",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2, ("data",)),
        ("{}", 8, ("data", "fsdp")),
        ("[2,4]<=[8]", 4, ("fsdp",)),
        ("[4,2]<=[2,4]T(1,0)", 2, ("data",)),
        ("[1,8]<=[8]", 8, ("data", "fsdp")),
        ("mesh['a'=2,'b'=4] {'b'}", 4, ("fsdp",)),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8, ("data", "fsdp")),
        ("mesh['a'=8] {'a':(2)4}", 4, ("fsdp",)),
        ("mesh['a'=8] {'a':(1)2}", 2, ("data",)),
    ],
)
def test_groups_run_along_axes_however_they_are_written(groups, size, axes):
    expected = Collective("all-reduce", 2 * 128 * (size - 1) // size, size, axes, 1)
    assert collectives(_reduced(groups), MESH) == [expected]


def test_an_asynchronous_collective_counts_once_and_by_its_result():
    text = _program(
        "%g = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], "
        "dimensions={0}",
        "%h = f32[16,8]{1,0} all-gather-done(%g)",
        "%s = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%x), "
        "source_target_pairs={{0,4},{4,0}}",
        "ROOT %p = f32[4,8]{1,0} collective-permute-done(%s)",
    )
    assert collectives(text, MESH) == [
        Collective("all-gather", 16 * 8 * 4 * 3 // 4, 4, ("fsdp",), 1),
        Collective("collective-permute", 4 * 8 * 4, 2, ("data",), 1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_reduced("somehow"), "replica groups"),
        (_program("ROOT %y = f32[4,8] collective-broadcast(%x)"), "collective-broadcast"),
        (_program("ROOT %y = odd[4,8] all-gather(%x), replica_groups={}"), "odd"),
        (_program("what is this"), "what is this"),
        (_program(devices=4), "4 devices, a mesh of 8"),
        ("", "HloModule"),
    ],
)
def test_a_form_that_is_not_known_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        collectives(text, MESH)


def test_a_loop_of_unknown_length_is_an_error_where_it_sends():
    text = _program(
        "ROOT %w = f32[4,8]{1,0} while(%x), condition=%test, body=%body",
        called=(
            "%test (c: f32[4,8]) -> pred[] {",
            "  %c = f32[4,8]{1,0} parameter(0)",
            "  ROOT %t = pred[] custom-call(%c)",
            "}",
            "%body (b: f32[4,8]) -> f32[4,8] {",
            "  %b = f32[4,8]{1,0} parameter(0)",
            "  ROOT %r = f32[4,8]{1,0} all-to-all(%b), replica_groups={}",
            "}",
        ),
    )
    with pytest.raises(ValueError, match="no known length"):
        collectives(text, MESH)
