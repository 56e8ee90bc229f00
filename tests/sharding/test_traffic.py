"""The collectives between devices that share a row do not grow with the row."""

import jax
import pytest
from devices import elsewhere
from small_models import run_config

from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.sources import TextConfig
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.precision import Precision
from ttcd_jax.run.build import Program
from ttcd_jax.sharding.collectives import collectives


def traffic(method):
    """Of a training step on eight devices along `seq`, at two lengths."""
    from tests.sharding.equal_on_devices import B, config, mesh_of

    model = config(method, precision=Precision(), remat="dots", scans_layers=True)
    mesh, found = mesh_of("1x1x8x1"), []
    for length in (256, 512):
        data = TextConfig(corpus=CorpusConfig(), tokenizer=TokenizerConfig(), seq_len=length)
        run = run_config(model, data=data, batch_size=B, loss_rows=16, accumulation_steps=1)
        with jax.set_mesh(mesh):
            text = Program(run, mesh).step().compile().as_text()
            found.append(sorted(collectives(text, mesh.shape, 8)))
    return found


@pytest.mark.parametrize("method", ["ipttcd", "full"])
def test_a_longer_row_sends_no_more_but_to_full_attention(method):
    short, long = elsewhere(traffic, method)
    assert "collective-permute" in {one.kind for one in short}
    assert {one.axes for one in short} == {"seq"}
    assert (long == short) == (method == "ipttcd")
