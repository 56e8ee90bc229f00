"""What a user of the layers may get wrong, without the type checks of the tests. A script: prints
{case: error} as JSON."""

import json
from pathlib import Path
from runpy import run_path

import jax.numpy as jnp
from flax import nnx

from ttcd_jax import IPTTCDMLP, DualWindowAttention, IPTTCDBlock, Piece, Transformer
from ttcd_jax.errors import UserError
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import prefill
from ttcd_jax.inference.state import start_state
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.train.loss import next_token_loss

EXAMPLE = run_path(str(Path(__file__).parents[2] / "examples" / "block_in_nnx.py"))
BLOCK, DIM = EXAMPLE["BLOCK"], EXAMPLE["DIM"]
block, mlp, attention = (
    layer(config, rngs=nnx.Rngs(0))
    for layer, config in (
        (IPTTCDBlock, BLOCK),
        (IPTTCDMLP, BLOCK.mlp),
        (DualWindowAttention, BLOCK.mixer),
    )
)
H, IDS = jnp.ones((2, 12, DIM)), jnp.zeros((2, 12), jnp.int32)
FITS = {"chunk_size": 8, "window": 16}
sizes = {"dim": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 8, "window": 4, "student_window": 2}
config = TransformerConfig(vocab_size=8, method="ipttcd", fast_layers=(0,), **sizes)
model, TOKENS = Transformer(config, rngs=nnx.Rngs(0)), jnp.arange(8).reshape(2, 4)


def state():
    return start_state(inference_model(model), 2)


CASES = {
    "width": lambda: block(H[..., :16]),
    "tokens": lambda: block(IDS),
    "float positions": lambda: block(H, positions=IDS.astype(float)),
    "short ids": lambda: block(H, segment_ids=IDS[:, :7]),
    "attention ids": lambda: attention(H, segment_ids=IDS[:1]),
    "student length": lambda: mlp(H, H[:, :5]),
    "student width": lambda: mlp(H, H[..., :16]),
    "mlp ids": lambda: mlp(H, H, IDS[:, :7]),
    "long piece": lambda: Piece.of(H[:, :6], 4, **FITS),
    "open piece": lambda: Piece.of(H, 0, **FITS),
    "uneven rows": lambda: Piece.of(H[:, :4], jnp.asarray([0, 4]), **FITS),
    "other rows": lambda: block.extend(
        H[:1, :8], Piece.of(H[:1, :8], 0, **FITS), block.start(2, None)
    ),
    "list": lambda: block([[1.0]]),
    "no rngs": lambda: IPTTCDBlock(BLOCK, rngs=0),
    "other config": lambda: IPTTCDMLP(BLOCK, rngs=nnx.Rngs(0)),
    "negative start": lambda: Piece.of(H[:, :4], -1, **FITS),
    "negative starts": lambda: Piece.of(H[:, :1], jnp.asarray([0, -2]), **FITS),
    "long lengths": lambda: Piece.of(H[:, :4], 0, lengths=jnp.asarray([4, 5]), **FITS),
    "other lengths": lambda: Piece.of(H[:, :4], 0, lengths=jnp.asarray([4]), **FITS),
    "other chunk": lambda: block.extend(
        H[:, :1], Piece.of(H[:, :1], 4, chunk_size=4, window=16), block.start(2, None)
    ),
    "other window": lambda: block.extend(
        H[:, :4], Piece.of(H[:, :4], 4, chunk_size=8, window=3), block.start(2, None)
    ),
    "large token": lambda: model(TOKENS + 8),
    "negative token": lambda: model(TOKENS - 1),
    "float tokens": lambda: model(TOKENS / 2),
    "one row": lambda: model(TOKENS[0]),
    "token list": lambda: model([[1, 2]]),
    "float token of a prompt": lambda: prefill(inference_model(model), state(), TOKENS / 2),
    "float token to decode": lambda: decode(inference_model(model), state(), TOKENS[:, 0] / 2),
    "nothing to predict": lambda: next_token_loss(model, TOKENS[:, :1]),
    "nan": lambda: MemoryConfig(eta=float("nan")),
    "infinity": lambda: MemoryConfig(zero_slope=float("inf")),
}

if __name__ == "__main__":
    errors = {}
    for name, case in CASES.items():
        try:
            case()
        except UserError as error:
            errors[name] = str(error)
    print(json.dumps(errors))
