"""Comparison with reference values: one check per kind of file.

`golden` reads files and holds all bounds, `modules` runs a Flax module with given parameters; the
checks are in `layers`, `models`, `operators`, `training` and `mad`. A check takes a file and the
dtype to compute in ("float32", "float64") and returns its worst comparison.
"""

from collections.abc import Callable

from experiments.parity import layers, mad, models, operators, training
from experiments.parity.golden import Comparison, Golden

Check = Callable[[Golden, str], Comparison]

CHECKS: dict[str, Check] = {
    "ipttcd_mlp": layers.check_mlp,
    "ipttcd_block": layers.check_block,
    "ipttcd_model": models.check_model,
    "ipttt_mlp": layers.check_mlp,
    "ipttt_model": models.check_model,
    "delta_op": operators.check_delta_rule,
    "delta_layer": layers.check_mixer,
    "delta_model": models.check_model,
    "lact_layer": layers.check_mixer,
    "lact_model": models.check_model,
    "dual_attn_inputs": operators.check_attention_inputs,
    "dual_attn": operators.check_attention,
    "optimizer": training.check_optimizer,
    "lr_schedule": training.check_schedule,
    "mad_instances": mad.check_instances,
    "mad_metrics": mad.check_metrics,
}
