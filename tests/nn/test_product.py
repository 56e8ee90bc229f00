import jax
import jax.numpy as jnp
import pytest
from checks import assert_close, draw

from ttcd_jax.nn.product import product


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("BLF,FD->BLD", [(2, 3, 4), (4, 5)]),
        ("BLF,BLD->BFD", [(2, 3, 4), (2, 3, 5)]),
        ("BCLF,BJMF->BCLJM", [(2, 2, 3, 4), (2, 5, 3, 4)]),
    ],
)
def test_gradients_are_those_of_einsum(equation, shapes, float64):
    a, b = draw(0, *shapes)

    def both(run):
        value, pull = jax.vjp(run, a, b)
        return value, pull(jnp.cos(value))

    ours = both(lambda a, b: product(equation, a, b, jnp.float64))
    assert_close(ours, both(lambda a, b: jnp.einsum(equation, a, b)))


def test_narrow_operands_have_wide_results_and_narrow_gradients():
    a, b = draw(0, (64, 32), (32, 16), dtype=jnp.bfloat16)
    value, pull = jax.vjp(lambda a, b: product("XF,FZ->XZ", a, b, jnp.float32), a, b)
    assert value.dtype == jnp.float32
    assert_close(value, a.astype(jnp.float32) @ b.astype(jnp.float32))
    assert [x.dtype for x in pull(value)] == [jnp.bfloat16] * 2
