"""What a user of the layers may get wrong, without the type checks of the tests. A script: prints
{case: error} as JSON."""

import json
from pathlib import Path
from runpy import run_path

import jax.numpy as jnp
from flax import nnx

from ttcd_jax import IPTTCDMLP, DualWindowAttention, IPTTCDBlock, Piece
from ttcd_jax.errors import UserError

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
}

if __name__ == "__main__":
    errors = {}
    for name, case in CASES.items():
        try:
            case()
        except UserError as error:
            errors[name] = str(error)
    print(json.dumps(errors))
