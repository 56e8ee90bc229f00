"""Comparison with reference values: one check per kind of file.

`golden` reads files and holds all bounds; the checks are in `models`, `operators`, `training` and
`mad`. A check takes a file and the dtype to compute in ("float32", "float64") and returns its worst
comparison.
"""

from collections.abc import Callable

from tests.parity import mad, models, operators, training
from tests.parity.golden import Comparison, Golden

Check = Callable[[Golden, str], Comparison]

CHECKS: dict[str, Check] = {
    **dict.fromkeys(("ipttcd_mlp", "ipttt_mlp", "ipttcd_block"), models.check_layer),
    **dict.fromkeys(("delta_layer", "lact_layer"), models.check_layer),
    **dict.fromkeys(("ipttcd_model", "ipttt_model"), models.check_model),
    **dict.fromkeys(("delta_model", "lact_model"), models.check_model),
    "delta_op": operators.check_delta_rule,
    "dual_attn_inputs": operators.check_attention_inputs,
    "dual_attn": operators.check_attention,
    "optimizer": training.check_optimizer,
    "lr_schedule": training.check_schedule,
    "mad_instances": mad.check_instances,
    "mad_metrics": mad.check_metrics,
}
