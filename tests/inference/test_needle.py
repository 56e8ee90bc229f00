"""A model trained to recall reads values back after many windows of decoding."""

import jax
import jax.numpy as jnp
import optax
from small_models import config_of

from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.synthetic.recall import RecallConfig, RecallRows, needles
from ttcd_jax.inference.model import inference_model
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.precision import Precision
from ttcd_jax.tasks.recall import read_back
from ttcd_jax.train.state import init_params, state_of, with_params
from ttcd_jax.train.step import make_train_step

DATA = RecallConfig(num_slots=32, num_keys=8, num_values=8)
SIZES = {"vocab_size": 16, "dim": 32, "mlp_dim": 64, "window": 8, "student_window": 4}
CONVS = {"teacher_conv_init": "identity", "student_conv_init": "normal"}
MEMORY = MemoryConfig(chunk_size=4, block_chunks=1, **CONVS)
FIELDS = {"init_std": 0.1, "fast_layers": (0, 1), "precision": Precision()}
MODEL = config_of("ipttcd", memory=MEMORY, **SIZES, **FIELDS)
NUM_STEPS, BATCH_SIZE = 110, 16
# Far beyond what two windows of 8 can carry (14), and beyond the rows of training (63 tokens).
DISTANCE = 80


def _trained():
    rate = optax.warmup_constant_schedule(0.0, 6e-3, 30)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    step = jax.jit(
        make_train_step(MODEL, optimizer, rate, loss_rows=256),
        donate_argnums=0,
        # Unlike most programs of the suite this one runs long enough to be worth compiling.
        compiler_options={"xla_backend_optimization_level": 1},
    )
    state = jax.jit(lambda: state_of(optimizer, init_params(MODEL, 0)))()
    rows = RecallRows(DATA, seed=0, num_rows=NUM_STEPS * BATCH_SIZE)
    batches = Batches(rows, batch_size=BATCH_SIZE)
    for index in range(NUM_STEPS):
        batch = batches.at(index)
        del batch["distance"]
        state, metrics = step(state, jax.tree.map(jnp.asarray, batch))
    assert metrics["loss"] < 0.5, "the model has not learned to recall"
    return state["params"]


def test_a_needle_is_read_back_after_long_decoding():
    # The third pair stays in the open chunk of the prompt: decoding has to write it.
    rows = needles(DATA, seed=1, num_rows=32, num_needles=3, num_tokens=DISTANCE)
    model = inference_model(with_params(MODEL, _trained()))
    (kept,) = read_back(model, rows, [DISTANCE])
    (published,) = read_back(model, rows, [DISTANCE], "published")
    assert read_back(model, rows, [DISTANCE // 2, DISTANCE], by="prefill")[1] == kept
    assert kept.queries == 96
    assert kept.accuracy > 0.9
    assert published.accuracy < 0.4  # chance is 1 in 8
