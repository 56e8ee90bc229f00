"""The reader of collectives (`sent_bytes`): kinds, bytes, loops, groups of one device.

Run as a program, the file prints what functions of `SENT` send on eight devices of a CPU.
"""

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from devices import printed
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sent_bytes import sent_bytes

SIZE = 16 * 8 * 4  # bytes of the operand
SENT = {
    "sum": {"all-reduce": SIZE},
    "sum along two axes": {"all-reduce": SIZE},
    "sum along an axis of one": {},
    "gather": {"all-gather": 2 * SIZE},
    "scatter": {"reduce-scatter": SIZE // 4},
    "exchange": {"all-to-all": SIZE},
    "shift": {"collective-permute": SIZE},
    "nested loops": {"collective-permute": 15 * SIZE, "all-reduce": 5 * SIZE},
    "branches": {"collective-permute": SIZE, "all-reduce": SIZE},
    "several at once": {"all-reduce": 2 * SIZE},
}


def _measure() -> dict[str, dict[str, int]]:
    lax = jax.lax
    mesh = jax.make_mesh((2, 2, 2, 1), ("data", "fsdp", "seq", "one"), (AxisType.Auto,) * 4)

    def shift(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, "seq", [(0, 1)]) * 2

    def repeated(function: Callable[[jax.Array], jax.Array], rounds: int) -> Callable:
        return lambda x: lax.scan(lambda c, _: (function(c), None), x, None, length=rounds)[0]

    functions = {
        "sum": lambda x: lax.psum(x, "data"),
        "sum along two axes": lambda x: lax.psum(x, ("data", "seq")),
        "sum along an axis of one": lambda x: lax.psum(x, "one"),
        "gather": lambda x: lax.all_gather(x, "fsdp", tiled=True),
        "scatter": lambda x: lax.psum_scatter(x, ("data", "fsdp"), tiled=True),
        "exchange": lambda x: lax.all_to_all(x, ("fsdp", "seq"), 0, 1, tiled=True),
        "shift": shift,
        "nested loops": repeated(lambda x: lax.psum(repeated(shift, 3)(x), "fsdp") / 2, 5),
        "branches": lambda x: lax.cond(x[0, 0] > 0, shift, lambda x: lax.psum(x, "data"), x),
        "several at once": lambda x: sum(lax.psum((x, x * x), "data")),
    }
    found = {}
    for name, function in functions.items():
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        found[name] = sent_bytes(str(jax.jit(mapped).lower(jnp.ones((16, 8))).compile().as_text()))
    return found


def test_the_bytes_of_a_program_are_read_from_its_text():
    output = printed(__file__, count=8)
    assert json.loads(output) == SENT


GROUPS = "replica_groups=mesh['a'=2] {'a'}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"%y = f32[4] collective-broadcast(%x), {GROUPS}", "collective-broadcast is not"),
        (f"%y = (f32[4], f32[8]) all-gather-start(%x), {GROUPS}", "all-gather-start is not"),
        ("%y = f32[4] all-reduce(%x), replica_groups={{0,1}}", "unknown replica groups"),
        ("%y = f32[4] while(%x), condition=%test, body=%body", "a loop of unknown length"),
    ],
)
def test_a_form_that_is_not_known_is_an_error(line, message):
    body = f"%body (b: f32[4]) -> f32[4] {{\n  ROOT %r = f32[4] all-reduce(%b), {GROUPS}\n}}"
    test = "%test (c: f32[4]) -> pred[] {\n  ROOT %t = pred[] custom-call(%c)\n}"
    with pytest.raises(ValueError, match=message):
        sent_bytes(f"{body}\n{test}\nENTRY %main (x: f32[4]) -> f32[4] {{\n  {line}\n}}")


if __name__ == "__main__":
    print(json.dumps(_measure()))
