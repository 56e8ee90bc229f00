"""Whether the configuration of another implementation expresses one of our models."""

import re
from typing import Any

from ttcd_jax.config import differences
from ttcd_jax.errors import UserError
from ttcd_jax.models.config import TransformerConfig, block_configs

# Fields of our blocks without effect on a document's output: speed (with the chunks of the delta
# rule), initialisation, gradients, document resets. Writers check the eps of q/k norms, which has
# an effect where there are any.
_UNSEEN = {
    "attention_implementation", "block_chunks", "conv_init", "folds_state", "form", "init_std",
    "precision", "proj_init", "qk_norm_eps", "resets_at_document", "rule.chunk_size",
    "student_conv_init", "teacher_conv_init", "zero_slope",
}  # fmt: skip


def check_expressed(ours: TransformerConfig, theirs: TransformerConfig, whose: str) -> None:
    """Raises `UserError` for the first field that differs between a model and its exported
    configuration. Fields without effect on the output of a document are not compared."""
    for difference in differences(_seen(theirs), _seen(ours)):
        name, _, values = difference.partition(": ")
        if not any(re.search(rf"\b{re.escape(unseen)}\b", name) for unseen in _UNSEEN):
            possible, _, value = values.partition(" -> ")
            raise UserError(f"{whose} cannot express {name} {value} of this model, only {possible}")


def _seen(config: TransformerConfig) -> dict[str, Any]:
    """The fields that the output of a model depends on."""
    fields = {name: getattr(config, name) for name in ("vocab_size", "norm_eps", "has_tied_head")}
    blocks = enumerate(block_configs(config))
    return fields | {f"layer {layer}": block.to_dict() for layer, block in blocks}
