"""Needles are read back as the forward pass over whole rows answers them."""

import jax
import jax.numpy as jnp
import numpy as np
from checks import randomize
from small_models import RECALL, config_of

from ttcd_jax.data.synthetic.recall import needles
from ttcd_jax.inference.model import inference_model
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.tasks.recall import read_back


def test_needles_are_read_back_as_one_pass_answers_them(float64):
    # The third pair stays in the open chunk of the prompt: decoding has to write it.
    rows = needles(RECALL, seed=1, num_rows=8, num_needles=3, num_tokens=20)
    model = randomize(Transformer, config_of("ipttcd"))
    read = [np.repeat(x[:, None], 3, axis=1) for x in (rows.pairs, rows.haystack)]
    whole = np.concatenate([*read, rows.keys[..., None]], axis=2)
    logits = jax.jit(lambda x: model(x)[:, -1])(jnp.asarray(whole.reshape(24, -1)))
    rows = rows._replace(values=np.asarray(logits.argmax(-1)).reshape(8, 3))
    model = inference_model(model)
    for by in ("decode", "prefill"):
        near, far = read_back(model, rows, [20, 10], by=by)
        assert (far.distance, far.queries, far.accuracy) == ("20", 24, 1.0)
        assert (near.distance, near.accuracy < 1) == ("10", True)
    (published,) = read_back(model, rows, [20], "published")
    assert published.accuracy < 1
