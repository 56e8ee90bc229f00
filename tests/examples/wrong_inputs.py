"""What a user of the layers may get wrong, without the type checks of the tests. A script."""

from functools import partial
from pathlib import Path
from runpy import run_path

import jax.numpy as jnp
from checks import refused
from flax import nnx

from ttcd_jax import IPTTCDMLP, DualWindowAttention, IPTTCDBlock, Piece, Transformer
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import prefill
from ttcd_jax.inference.state import start_state
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
sizes = {"dim": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 8, "window": 4, "student_window": 2}
config = TransformerConfig(vocab_size=8, method="ipttcd", fast_layers=(0,), **sizes)
MODEL, TOKENS = Transformer(config, rngs=nnx.Rngs(0)), jnp.arange(8).reshape(2, 4)


def piece(h, start, **options):
    return Piece.of(h, start, **{"chunk_size": 8, "window": 16} | options)


def extend(num_tokens, start, num_rows=2, **options):
    h = H[:num_rows, :num_tokens]
    return block.extend(h, piece(h, start, **options), block.start(2, None))


def read(call, *tokens):
    model = inference_model(MODEL)
    return call(model, start_state(model, 2), *tokens)


def replaced(mlp):
    return BLOCK.replace(mlp=BLOCK.mlp.replace(mlp=mlp))


STATE, NARROW = block.start(2, None), BLOCK.mlp.mlp.replace(dim=8)
CASES = [
    ("float32 [2, 12, 16]|float [B, T, 32]", block, H[..., :16]),
    ("int32 [2, 12]|float [B, T, 32]", block, IDS),
    ("positions are float32 [2, 12]|int [2, 12]", block, H, IDS.astype(float)),
    ("segment_ids are int32 [2, 7]|int [2, 12]", block, H, None, IDS[:, :7]),
    ("segment_ids are int32 [1, 12]|int [2, 12]", attention, H, None, IDS[:1]),
    ("x [2, 12, 32]|t [2, 5, 32]|same shape", mlp, H, H[:, :5]),
    ("t is float32 [2, 12, 16]|float [B, T, 32]", mlp, H, H[..., :16]),
    ("segment_ids are int32 [2, 7]|int [2, 12]", mlp, H, H, IDS[:, :7]),
    ("6 tokens|4 that the open chunk of 8", piece, H[:, :6], 4),
    ("12 tokens|8 that the open chunk of 8", piece, H, 0),
    ("4 tokens|one start for all rows", piece, H[:, :4], jnp.asarray([0, 4])),
    ("h has 1 rows|2 rows", extend, 8, 0, 1),
    ("h has 2 rows of 3 tokens|made of 2 of 4", block.extend, H[:, :3], piece(H[:, :4], 4), STATE),
    ("h has 2 rows of 4 tokens|made of 1 of 4", block.extend, H[:, :4], piece(H[:1, :4], 4), STATE),
    ("mixer dim 32 and mlp dim 8|give them one", replaced, NARROW),
    ("h is a list|float [B, T, 32]", block, [[1.0]]),
    ("IPTTCDBlock|nnx.Rngs(seed)|0", partial(IPTTCDBlock, BLOCK, rngs=0)),
    ("IPTTCDMLP|IPTTCDConfig|IPTTCDBlockConfig", partial(IPTTCDMLP, BLOCK, rngs=nnx.Rngs(0))),
    ("start -1|0 .. inf", piece, H[:, :4], -1),
    ("start [0, -2]|0 .. inf", piece, H[:, :1], jnp.asarray([0, -2])),
    ("lengths [4, 5]|0 .. 4", partial(piece, H[:, :4], 0, lengths=jnp.asarray([4, 5]))),
    ("lengths are int32 [1]|int [2]", partial(piece, H[:, :4], 0, lengths=jnp.asarray([4]))),
    ("chunk_size 4|8", partial(extend, 1, 4, chunk_size=4)),
    ("window 3|16", partial(extend, 4, 4, window=3)),
    ("token 8 at position 0, 0|vocabulary of 8 tokens", MODEL, TOKENS + 8),
    ("token -1 at position 0, 0|vocabulary of 8 tokens", MODEL, TOKENS - 1),
    ("tokens are float32 [2, 4]|int [B, T]", MODEL, TOKENS / 2),
    ("tokens are int32 [4]|int [B, T]", MODEL, TOKENS[0]),
    ("tokens are a list|int [B, T]", MODEL, [[1, 2]]),
    ("tokens are float32 [2, 4]|int [2, T]", read, prefill, TOKENS / 2),
    ("tokens are float32 [2]|int [2]", read, decode, TOKENS[:, 0] / 2),
    ("tokens [2, 1]|no next token", next_token_loss, MODEL, TOKENS[:, :1]),
]

if __name__ == "__main__":
    for words, call, *arguments in CASES:
        refused(words, call, *arguments)
    print(len(CASES))
