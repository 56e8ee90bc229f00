"""The configuration of a language model: the sizes of its layers, and the method of its memory."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from ttcd_jax.config import Bound, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.methods import Settings, method_named
from ttcd_jax.methods.registry import ModelConfig
from ttcd_jax.nn.block import BlockConfig

Remat = Literal["none", "block", "dots", "offload"]


class TransformerConfig(ModelConfig):
    """A language model: embedding of `vocab_size` ids, `num_layers` blocks by method, final norm,
    head (`has_tied_head`: the embedding's weights).

    `method` names a method of `ttcd_jax.methods`, `memory` holds its settings (None: its defaults).
    `fast_layers` are the layers that have the method's memory, where the method leaves the choice;
    the others have attention and SwiGLU. `remat`: the backward recomputes nothing ("none"), all but
    products with parameters and attention ("dots": six tenths of the memory of "none"), whole
    blocks ("block"), or whole blocks from inputs offloaded to the host ("offload"); None: as
    `ttcd_jax.run.layout` chooses for a run, elsewhere "dots". `scans_layers`: equal layers are
    compiled once and scanned, or unrolled, on the same parameters; None: likewise, elsewhere True.
    """

    vocab_size: Positive
    num_layers: Annotated[int, Bound("in 1 .. 10,000", lambda count: 0 < count <= 10_000)]
    method: str
    fast_layers: tuple[int, ...] = ()
    has_tied_head: bool = True
    remat: Remat | None = None
    scans_layers: bool | None = None

    def validate(self) -> None:
        super().validate()
        method = method_named(self.method)
        outside = [layer for layer in self.fast_layers if not 0 <= layer < self.num_layers]
        if outside:
            raise UserError(f"fast_layers {outside} outside 0 .. {self.num_layers - 1}")
        if len(set(self.fast_layers)) != len(self.fast_layers):
            raise UserError(f"fast_layers {self.fast_layers} names a layer twice")
        if method.layers == "fast" and not self.fast_layers:
            raise UserError(
                f"method {self.method!r} has no layer with a memory: set fast_layers, e.g. (0,), "
                "or take a method without memory"
            )
        if method.layers != "fast" and self.fast_layers:
            where = {"all": "has its memory in all layers", "none": "has no memory"}[method.layers]
            raise UserError(
                f"method {self.method!r} {where}, got fast_layers {self.fast_layers}: set "
                "fast_layers = ()"
            )
        if self.memory is not None and type(self.memory) is not method.settings:
            wanted = "None" if method.settings is None else f"@{method.settings.__name__}()"
            raise UserError(
                f"method {self.method!r} has no settings {type(self.memory).__name__}: set memory "
                f"= {wanted}"
            )
        block_configs(self)

    def overridden(self, values: dict[str, Any], bound: Collection[str]) -> "TransformerConfig":
        """Settings and fast layers that another method cannot have are dropped, and a window, or
        none, makes a plain transformer one of the other kind (`Method.twin`)."""
        name = values["method"]
        if "method" not in bound and (values["window"] is None) != (self.window is None):
            name = method_named(name).twin or name
        method, changes = method_named(name), {"method": name}
        if type(values["memory"]) is not method.settings and "memory" not in bound:
            changes["memory"] = None
        if method.layers != "fast" and "fast_layers" not in bound:
            changes["fast_layers"] = ()
        return super().overridden(values | changes, bound)

    @property
    def settings(self) -> Settings | None:
        """The settings of the method, its defaults unless bound; None for one without."""
        defaults = method_named(self.method).settings
        return self.memory if self.memory is not None or defaults is None else defaults()

    @property
    def label(self) -> str:
        """The method in tables as its settings change it, "IP-TTCD + delta rule"; "no gap": the
        student sees all that its teacher sees."""
        words, sees = "" if self.settings is None else self.settings.words, self.student_window
        if self.window is not None and sees >= self.window and layers_with_teacher(self):
            words += ", no gap"
        return method_named(self.method).label + words

    @property
    def stream_window(self) -> int | None:
        """The window of the stream that goes on to the head."""
        is_student = self.settings is not None and self.settings.goes_on_as_student
        return self.student_window if is_student else self.window

    def without_gap(self, length: int) -> dict[str, int]:
        """The field to change, so that in rows of `length` tokens the student of a model with a
        teacher sees what the teacher sees: what the stream sees that goes on."""
        other = "student_window" if self.stream_window == self.window else "window"
        return {other: self.stream_window or length}


def block_configs(config: TransformerConfig) -> tuple[BlockConfig, ...]:
    method = method_named(config.method)
    block, layers = method.block(config, config.settings), range(config.num_layers)
    if isinstance(block, tuple):
        return block
    if method.layers != "fast":
        return (block,) * len(layers)
    plain = config.plain_block()
    return tuple(block if layer in config.fast_layers else plain for layer in layers)


def memory_chunk(config: TransformerConfig) -> int | None:
    """Tokens per chunk of the model's memories, all alike; None where nothing is written chunk by
    chunk."""
    return next((block.chunk_size for block in block_configs(config) if block.chunk_size), None)


def has_in_place_memory(config: TransformerConfig) -> bool:
    """Whether some layer has a memory that rows can bypass."""
    return any(block.is_in_place for block in block_configs(config))


def layers_with_teacher(config: TransformerConfig) -> list[int]:
    """The layers whose memory distills a teacher's features into a student's."""
    return [layer for layer, block in enumerate(block_configs(config)) if block.has_teacher]


def switched_off(config: TransformerConfig, length: int) -> TransformerConfig | None:
    """The model of the same parameters whose rows of `length` tokens read nothing from memory; None
    where the memory is the mixer itself, or absent."""
    settings = config.settings
    off = None if settings is None else settings.switched_off(length)
    return None if off is None else config.replace(memory=off)


def forward_flops(config: TransformerConfig, length: int) -> int | float:
    """FLOPs of one forward pass over a row of `length` tokens, head included, from shapes
    (`SublayerConfig.flops`): XLA counts the body of a scan once."""
    blocks = sum(block.flops(length) for block in block_configs(config))
    return blocks + 2 * length * config.dim * config.vocab_size


def training_flops_per_token(config: TransformerConfig, length: int) -> int | float:
    """FLOPs of the forward and the backward pass per token, for rows of `length` tokens: three
    times the forward pass; recomputation is not counted."""
    return 3 * forward_flops(config, length) / length
