"""The only table from logical axes to mesh axes, for parameters and activations alike, and what
follows from it: shards, whole parameters, looked up rows, the batches of processes.

Layers name their dimensions (`ttcd_jax.axes`); the table maps each name to the mesh axes that shard
it. To shard a model differently, change the table.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ttcd_jax.axes import LOGICAL_AXES
from ttcd_jax.errors import UserError
from ttcd_jax.sharding.mesh import AXES

Names = Sequence[str | None]

# The axes of rows and positions: every device along them computes with whole weights.
BATCH, LENGTH = ("data", "fsdp"), ("seq",)
TENSOR = "tensor"  # of vocabulary entries, heads and features

RULES: dict[str, tuple[str, ...]] = {
    # Parameter axes: replicated, unless they follow.
    **dict.fromkeys(LOGICAL_AXES, ()),
    **dict.fromkeys(("mlp", "heads", "kv_heads", "vocab"), ("tensor",)),
    "embed": ("fsdp", "seq"),
    # Activation axes. The model dimension of an activation is always whole: None.
    "batch": BATCH,
    "length": LENGTH,
    "copies": (*BATCH, *LENGTH, "tensor"),
}


def spec(names: Names, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The sharding on `mesh` of an array with these logical axes; None is a dimension that stays
    whole. Mesh axes of another name, and those that are manual in a surrounding `shard_map`, are
    not used. Raises `KeyError` for a logical axis that the table lacks."""
    free, parts = _free_axes(mesh), (() if name is None else RULES[name] for name in names)
    return PartitionSpec(*(tuple(axis for axis in axes if axis in free) for axes in parts))


def _free_axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Sizes of our mesh axes that the compiler partitions."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if explicit := [name for name in AXES if kinds.get(name) == AxisType.Explicit]:
        raise UserError(
            f"mesh axis {explicit[0]!r} is Explicit, and layers are partitioned along Auto axes: "
            "make the mesh by ttcd_jax.sharding.mesh.build_mesh, or with axis_types Auto"
        )
    return {name: mesh.shape[name] for name in AXES if kinds.get(name) == AxisType.Auto}


def axis_size(name: str) -> int:
    """Devices along a mesh axis of the mesh in use; 1 without one."""
    return _free_axes(jax.sharding.get_abstract_mesh()).get(name, 1)


def is_distributed() -> bool:
    """Whether the mesh in use has more than one device along an axis of ours."""
    return any(axis_size(name) > 1 for name in AXES)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """x, sharded by its logical axes; x itself when no mesh is in use."""
    if not is_distributed():
        return x
    where = spec(names, jax.sharding.get_abstract_mesh())
    return jax.lax.with_sharding_constraint(x, where)


class Shard(NamedTuple):
    """The shard of every array that one device computes on, inside `sharded`. Without a mesh it is
    the whole array, and every collective returns its argument."""

    axes: frozenset[str] = frozenset()  # mesh axes that are manual here

    def size(self, axis: str) -> int:
        return jax.lax.axis_size(axis) if axis in self.axes else 1

    def index(self, axis: str) -> jax.Array:
        return jax.lax.axis_index(axis) if axis in self.axes else jnp.zeros((), jnp.int32)

    def reduced(self, reduce: Callable[..., Any], tree: Any, *axes: str) -> Any:
        """Every array reduced, element by element, over the devices along `axes`."""
        manual = tuple(axis for axis in axes if axis in self.axes)
        return reduce(tree, manual) if manual else tree

    sum = functools.partialmethod(reduced, jax.lax.psum)
    max = functools.partialmethod(reduced, jax.lax.pmax)
    min = functools.partialmethod(reduced, jax.lax.pmin)


def sharded(function: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> Callable:
    """`function(shard, *arrays)`, run by every device on its shards of the arrays. `inputs` and
    `outputs` hold logical axes: one tuple of names per array, or one for all arrays of a tree;
    dimensions without a name are whole. Without a mesh `function` gets the arrays as they are."""
    if not is_distributed():
        return functools.partial(function, Shard())
    mesh = jax.sharding.get_abstract_mesh()

    def specs(tree: Any) -> Any:
        if _is_names(tree):
            return spec(tree, mesh)
        parts = map(specs, tree)
        return tree._make(parts) if hasattr(tree, "_make") else tuple(parts)

    return jax.shard_map(
        functools.partial(function, Shard(frozenset(_free_axes(mesh)))),
        in_specs=tuple(map(specs, inputs)),
        out_specs=specs(outputs),
        check_vma=False,
    )


def _is_names(node: Any) -> bool:
    return type(node) is tuple and all(isinstance(name, str | None) for name in node)


# The checkpoint name of gathered parameters: remat never saves them, it gathers them again.
GATHERED = "gathered"


def gathered(weight: Any, dtype: DTypeLike) -> Any:
    """A parameter gathered along `embed` for computations, `rounded` to `dtype`. The devices along
    `fsdp` and `seq` hold shards of it and exchange them here, in that dtype, unless `take_copy`
    gave it a copy; its gradient, in the stored dtype, returns to the same shards. Without a mesh it
    is the stored array itself. `weight`: a parameter with its metadata (`ttcd_jax.axes.param`)."""
    if (copy := weight.get_metadata("copy", None)) is not None:
        return copy
    x = weight[...]
    if not is_distributed():
        return x
    names = weight.get_metadata("axes")[-x.ndim :]

    def exchange(x: jax.Array) -> jax.Array:
        return checkpoint_name(constrain(x, *_of_copy(names)), GATHERED)

    gather = jax.custom_vjp(exchange)
    gather.defvjp(lambda x: (exchange(x), None), lambda _, dx: (constrain(dx, *names),))
    return gather(rounded(x, weight, dtype)).astype(x.dtype)


def copied(weight: Any, dtype: DTypeLike) -> jax.Array:
    """A parameter gathered and `rounded`, of which nothing takes a gradient: for `take_copy`."""
    x = constrain(rounded(weight[...], weight, dtype), *_of_copy(weight.get_metadata("axes")))
    # Else XLA would exchange what is stored: it may keep digits that a program rounds off.
    return jax.lax.optimization_barrier(x)


class Copies(NamedTuple):
    """A table [V, D] of which every device has a copy, its part along `tensor`: those of all, one
    after the other."""

    stacked: Float[Array, "X D"]


def table_axes(table: jax.Array | Copies) -> tuple[jax.Array, tuple[str, ...]]:
    return (table.stacked, ("copies",)) if isinstance(table, Copies) else (table, ("vocab",))


def own_entries(
    shard: Shard, ids: Int[Array, "..."], num_entries: int
) -> tuple[jax.Array, jax.Array]:
    """(row in this device's shard of `num_entries` vocabulary entries, whether the entry is in it)
    of every id; an entry of another device has row 0."""
    row = ids - shard.index(TENSOR) * num_entries
    is_own = (row >= 0) & (row < num_entries)
    return jnp.where(is_own, row, 0), is_own


def lookup(table: Float[Array, "V D"] | Copies, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of the table, NaN for a token outside of it: a compiled program cannot refuse."""

    def on_shard(shard: Shard, table: jax.Array, tokens: jax.Array) -> jax.Array:
        row, is_own = own_entries(shard, tokens, len(table))
        found = table[tokens if shard.size(TENSOR) == 1 else row]
        if shard.size(TENSOR) > 1:
            found = shard.sum(jnp.where(is_own[..., None], found, 0), TENSOR)
        is_known = (tokens >= 0) & (tokens < len(table) * shard.size(TENSOR))
        return jnp.where(is_known[..., None], found, jnp.nan)

    rows, (array, axes) = ("batch", "length"), table_axes(table)
    return sharded(on_shard, (axes, rows), rows)(array, tokens)


def take_copy(weight: Any, copy: jax.Array) -> None:
    """Lets `gathered` take the `copied` parameter wherever `weight` is used. The gradients of all
    its uses are added on each device, in the stored dtype, and return to the shards at once."""

    def returned(shard: Shard, dx: jax.Array) -> jax.Array:
        along = tuple(axis for axis in RULES["embed"] if axis in shard.axes)
        dx = jax.lax.psum_scatter(dx, along, scatter_dimension=1, tiled=True)
        return shard.sum(dx, "data")

    stack = sharded(lambda _, x: x, (("vocab",),), ("copies",))
    add = sharded(returned, (("copies",),), weight.get_metadata("axes"))
    take = jax.custom_vjp(lambda x, copy: stack(copy).astype(x.dtype))
    take.defvjp(lambda *xs: (take(*xs), None), lambda _, dx: (add(dx), None))
    weight.set_metadata(copy=Copies(take(weight[...], copy)))


def _of_copy(names: Names) -> Names:
    return [None if name == "embed" else name for name in names]


def rounded(x: jax.Array, weight: Any, dtype: DTypeLike) -> jax.Array:
    """x, rounded to `dtype` if the parameter `weight` is only an operand of products."""
    return x.astype(dtype) if weight.get_metadata("is_operand") else x


def never_saves_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A remat policy: everything is kept except the results of `gathered`."""
    is_gathered = primitive.name == "name" and parameters["name"] == GATHERED
    return not is_gathered and primitive.name != "sharding_constraint"


def shardings(mesh: Mesh | AbstractMesh, axes: Any, arrays: Any) -> Any:
    """A `NamedSharding` for every array of a tree, by the axis names in the same tree `axes`.
    Raises `UserError` where a dimension does not divide among its devices."""

    def sharding(path: Any, array: Any, names: Names) -> NamedSharding:
        for name, size in zip(names, array.shape, strict=True):
            mesh_axes = RULES[name] if name is not None else ()
            parts = math.prod(mesh.shape.get(axis, 1) for axis in mesh_axes)
            if size % parts:
                raise UserError(
                    f"{jax.tree_util.keystr(path, simple=True, separator='/')} {array.shape}: its "
                    f"axis {name!r} of {size} does not divide among {parts} devices "
                    f"({' x '.join(mesh_axes)}): change MeshConfig or the size"
                )
        return NamedSharding(mesh, spec(names, mesh))

    # The arrays decide: in `axes`, () is a scalar's names or a part of the tree without arrays.
    return jax.tree_util.tree_map_with_path(
        sharding, arrays, axes, is_leaf=lambda node: hasattr(node, "shape")
    )


class Placement:
    """Fields [batch_size, length] of a batch, sharded along rows and positions of `mesh`. Raises
    `UserError` when rows or positions do not divide among the devices."""

    def __init__(self, mesh: Mesh | AbstractMesh, *, batch_size: int, length: int) -> None:
        self._shape = (batch_size, length)
        fields = {"fields [batch_size, seq_len]": jax.ShapeDtypeStruct(self._shape, np.int32)}
        axes = dict.fromkeys(fields, ("batch", "length"))
        (self._sharding,) = shardings(mesh, axes, fields).values()

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """The rows with a part on this process's devices, which it supplies, in ascending order."""
        shards = self._sharding.addressable_devices_indices_map(self._shape).values()
        indices = (range(self._shape[0])[index[0]] for index in shards if index is not None)
        return tuple(sorted({row for rows in indices for row in rows}))

    def abstract(self, kinds: Mapping[str, str]) -> dict[str, jax.ShapeDtypeStruct]:
        shape, where = self._shape, self._sharding
        return {x: jax.ShapeDtypeStruct(shape, kinds[x], sharding=where) for x in kinds}

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """The global arrays of a batch whose fields hold this process's `rows`."""

        def array(field: np.ndarray) -> jax.Array:
            whole = np.empty(self._shape, field.dtype)  # other rows are those of no device here
            whole[list(self.rows)] = field
            return jax.make_array_from_callback(self._shape, self._sharding, whole.__getitem__)

        return {name: array(field) for name, field in batch.items()}


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
