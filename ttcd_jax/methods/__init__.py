"""Methods, one module each; importing this package registers all of them."""

from ttcd_jax.methods import (
    delta_net,
    gated_delta_net,
    ideal,
    ip_ttt,
    ipttcd,
    lact,
    plain,
)
from ttcd_jax.methods.registry import METHODS, Method, Settings, method_named, register

__all__ = [
    "METHODS",
    "Method",
    "Settings",
    "delta_net",
    "gated_delta_net",
    "ideal",
    "ip_ttt",
    "ipttcd",
    "lact",
    "method_named",
    "plain",
    "register",
]
