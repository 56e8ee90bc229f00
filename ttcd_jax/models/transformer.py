"""The stacked transformer: embedding, groups of scanned blocks, final norm, tied or untied head."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float, Int
from ttcd_kernels.dual_window.cotangents import ATTENTION

from ttcd_jax.allocation import keep_freed_memory
from ttcd_jax.axes import param
from ttcd_jax.memory.distillation import Distillation
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.nn.block import Block, BlockConfig, Configured, MemoryStats, Report
from ttcd_jax.nn.linear import PRODUCT, normal_param, rms_norm
from ttcd_jax.nn.row import Control, Hidden, Row, check_array
from ttcd_jax.sharding import rules
from ttcd_jax.sharding.rules import constrain, copied, gathered, is_distributed, lookup, take_copy
from ttcd_jax.tokens import check_tokens

_WIDE = 512  # from here on page faults are little beside the arithmetic, and fragments are large


class Run(NamedTuple):
    """A scan over `repeats` copies of one unit of blocks."""

    unit: tuple[BlockConfig, ...]
    repeats: int


class Slot(NamedTuple):
    """The position of a layer's parameters: attribute names, and the row of the stacked arrays."""

    group: str
    block: str
    row: int


def scan_plan(blocks: tuple[BlockConfig, ...]) -> tuple[Run, ...]:
    """The shortest unit whose repetition is all layers ({0, 6, 12, 18} of 24: one fast block and
    five plain ones, four times); an irregular pattern becomes one run per stretch of equal
    blocks."""
    for size in range(1, len(blocks) // 2 + 1):
        if len(blocks) % size == 0 and blocks[:size] * (len(blocks) // size) == blocks:
            return (Run(blocks[:size], len(blocks) // size),)
    return tuple(Run((block,), len([*same])) for block, same in itertools.groupby(blocks))


def layer_slots(config: TransformerConfig) -> list[Slot]:
    """The slots of all layers in the parameter tree, in order."""
    return [
        Slot(f"group_{group}", f"block_{block}", row)
        for group, run in enumerate(scan_plan(block_configs(config)))
        for row in range(run.repeats)
        for block in range(len(run.unit))
    ]


class _Unit(nnx.Module):
    """The repeated blocks, as attributes block_0, block_1, ..."""

    def __init__(self, blocks: tuple[BlockConfig, ...], *, rngs: nnx.Rngs) -> None:
        self.num_blocks = len(blocks)
        for index, config in enumerate(blocks):
            setattr(self, f"block_{index}", Block(config, rngs=rngs))

    def blocks(self) -> list[Block]:
        return [getattr(self, f"block_{index}") for index in range(self.num_blocks)]


def _stacked(run: Run, rngs: nnx.Rngs) -> _Unit:
    """A unit whose parameters carry a leading `layers` axis, each copy initialized on its own."""

    @nnx.split_rngs(splits=run.repeats)
    @nnx.vmap(in_axes=(nnx.StateAxes({...: 0}),), out_axes=0)
    def create(rngs: nnx.Rngs) -> _Unit:
        return _Unit(run.unit, rngs=rngs)

    unit = create(rngs)
    for _, variable in nnx.to_flat_state(nnx.state(unit, nnx.Param)):
        variable.set_metadata(axes=("layers", *variable.get_metadata("axes")))
    return unit


class Transformer(Configured):
    """tokens [B, T] -> logits [B, T, V]; `forward` returns hidden states and memory statistics.
    Raises `UserError` for arrays that are not of these shapes, or not int, and for tokens outside
    the vocabulary; inside `jit`, where values are not known, such a token's outputs are NaN."""

    config_class = TransformerConfig

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        if config.dim < _WIDE:
            keep_freed_memory()
        self.config = config
        std, dtype = config.init_std, config.precision.param_dtype
        vocab = (config.vocab_size, config.dim)
        self.embedding = normal_param(rngs, vocab, ("vocab", "embed"), std, dtype)
        self.plan = scan_plan(block_configs(config))
        for index, run in enumerate(self.plan):
            setattr(self, f"group_{index}", _stacked(run, rngs))
        self.final_norm = param(jnp.ones((config.dim,), dtype), ("embed",))
        if not config.has_tied_head:
            self.head = normal_param(rngs, vocab, ("vocab", "embed"), std, dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits in the compute dtype. For a loss over a large vocabulary use `forward` and
        `head_weight` with `train.loss`, which never holds all logits at once."""
        return self.logits(self.forward(tokens, segment_ids)[0])

    def logits(self, hidden: Hidden) -> Float[Array, "B T V"]:
        """The output of the head on the hidden states of `forward`."""
        return jnp.einsum("BTD,VD->BTV", hidden, self.head_weight().astype(hidden.dtype))

    def head_weight(self) -> Any:
        """The table [V, D] of the head; after `take_copies`, the copies of all devices."""
        return self._gathered(self.embedding if self.config.has_tied_head else self.head)

    def copies(self) -> dict[str, jax.Array]:
        """What the devices exchange of the embedding and of a head of its own, by name; empty
        without a mesh."""
        names = ("embedding", *(() if self.config.has_tied_head else ("head",)))
        dtype = self.config.precision.compute_dtype
        return {name: copied(getattr(self, name), dtype) for name in names if is_distributed()}

    def take_copies(self, copies: dict[str, jax.Array]) -> "Transformer":
        """This model, which uses the `copies` of one with the same parameters."""
        for name, copy in copies.items():
            take_copy(getattr(self, name), copy)
        return self

    def _gathered(self, weight: nnx.Param) -> Any:
        return gathered(weight, self.config.precision.compute_dtype)

    def forward(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        *,
        control: Control | None = None,
    ) -> tuple[Hidden, MemoryStats | None]:
        """(final normed hidden states, statistics [fast layers] in layer order). Tokens of
        different segments do not see each other, in attention, convolutions or memory. Positions
        (default: 0, 1, ... from the start of each document) matter by their differences inside a
        document; to the fast weights of LaCT also as they are. A `control` changes what memories in
        place hold."""
        row = self._row(tokens, positions, segment_ids)._replace(control=control)
        h, stats = self._blocks(row, tokens)
        return self.normed(h), stats

    def _row(self, tokens: Any, positions: Any, segment_ids: Any) -> Row:
        """The row of tokens, checked."""
        check_array("the model", "tokens", tokens, "int", "B", "T")
        if not isinstance(tokens, Tracer):
            check_tokens(tokens, self.config.vocab_size)
        return Row.of(tokens, positions, segment_ids)

    def distillation(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Distillation:
        """Of every token the distances to the teacher [layers with a teacher, B, T], measured in a
        forward pass. The model must have such layers (`models.config.layers_with_teacher`)."""
        row = self._row(tokens, None, segment_ids)._replace(measures=True)
        return self._blocks(row, tokens)[1]

    def _blocks(self, row: Row, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """(residual stream after all blocks, the reports of the memories in layer order)."""
        dtype = self.config.precision.compute_dtype
        h = lookup(self._gathered(self.embedding), tokens).astype(dtype)
        row, reports = row._replace(embeddings=h), []
        for index, run in enumerate(self.plan):
            h, run_reports = self._run(getattr(self, f"group_{index}"), run, h, row)
            reports.extend(run_reports)
        joined = jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports) if reports else None
        return h, joined

    def normed(self, h: Hidden) -> Hidden:
        """The input of the head: the normed residual stream."""
        return rms_norm(h, self._gathered(self.final_norm), self.config.norm_eps)

    def _run(self, unit: _Unit, run: Run, h: jax.Array, row: Row) -> tuple[jax.Array, list[Report]]:
        """(h, reports of the fast layers in order) after all repeats of a unit."""
        graph, params = nnx.split(unit)
        is_scanned = self.config.scans_layers is not False and run.repeats > 1

        def body(h: jax.Array, layer_params: Any) -> tuple[jax.Array, list[Report]]:
            reports = []
            for block in nnx.merge(graph, layer_params).blocks():
                h, report = self._apply(block, h, row, is_scanned)
                reports.extend([] if report is None else [report])
            return h, reports

        if is_scanned:
            h, reports = jax.lax.scan(body, h, params)
            rows = [jax.tree.map(lambda x, i=i: x[i], reports) for i in range(run.repeats)]
        else:
            rows = []
            for i in range(run.repeats):
                h, reports = body(h, jax.tree.map(lambda x, i=i: x[i], params))
                rows.append(reports)
        return h, [report for reports in rows for report in reports]

    def _apply(
        self, block: Block, h: jax.Array, row: Row, is_scanned: bool
    ) -> tuple[jax.Array, Report]:
        """(h, report or None) after one block, the unit of remat."""
        graph, params = nnx.split(block)
        dtype = self.config.precision.compute_dtype

        def whole(weight: nnx.Variable) -> nnx.Variable:
            return weight.replace(gathered(weight, dtype))

        def forward(h: jax.Array, params: Any) -> tuple[jax.Array, Report]:
            h = checkpoint_name(h, _BOUNDARY)
            params = jax.tree.map(whole, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
            h, report = nnx.merge(graph, params).forward(h, row)
            return constrain(h, "batch", "length", None), report

        # On a mesh "none" still gathers the parameters again: kept whole, they would undo `fsdp`.
        if (remat := self.config.remat or "dots") != "none" or is_distributed():
            # Outside a scan XLA would merge the recomputation with the forward.
            policy = _POLICIES[remat]
            forward = jax.checkpoint(forward, policy=policy, prevent_cse=not is_scanned)
        return forward(h, params)


_BOUNDARY = "residual stream"  # the input of a block
_POLICIES = {
    "none": rules.never_saves_gathered,
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENTION),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_BOUNDARY],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
