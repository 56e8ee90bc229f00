"""What a run is built of: its layout on devices, and the batch that it is compiled for, which is
the one that its data make."""

import corpora
import jax
import numpy as np
import pytest
from checks import refused
from jax.sharding import AbstractMesh
from small_models import RECALL, config_of, recipe, run_config

from ttcd_jax import BatchesConfig, RunConfig
from ttcd_jax.commands.cli import CONFIG_DIR
from ttcd_jax.data.sources import MixtureConfig, TextConfig
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.run import build, layout
from ttcd_jax.sharding.mesh import AXES, MeshConfig, build_mesh
from ttcd_jax.train.state import abstract_params

RECIPES = sorted(
    str(path.relative_to(CONFIG_DIR))
    for path in (*CONFIG_DIR.glob("*_[37][46]0m.gin"), *CONFIG_DIR.glob("ablation/*.gin"))
)


def _mesh(config: RunConfig, num_devices: int) -> AbstractMesh:
    sizes = layout.mesh_config(config, num_devices).sizes(num_devices)
    return AbstractMesh(tuple(sizes.values()), AXES)


def _laid_out(config: RunConfig, num_devices: int) -> tuple[tuple[int, ...], int]:
    mesh = _mesh(config, num_devices)
    return mesh.axis_sizes, layout.num_parts(config, mesh)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_divides_among_devices_a_row_of_32768_tokens_at_a_time(name):
    config = recipe(name)
    for num_devices in (1, 2, 8, 64, 128):
        by_rows = min(num_devices, config.batch_size)
        sizes = 1, by_rows, num_devices // by_rows, 1
        assert _laid_out(config, num_devices) == (sizes, config.batch_size // by_rows)


def test_copies_of_a_model_stay_in_a_node_where_its_state_leaves_room_and_rows_divide():
    small, large = recipe("ipttcd_760m.gin"), recipe("cpt/ipttcd_llama31_8b.gin")
    for config, num_devices, nodes, memory, expected in (
        (small, 64, 8, 80e9, (8, 4, 2, 1)),
        (small, 512, 64, 80e9, (32, 1, 16, 1)),  # 32 rows
        (small, 128, 16, 80e9, (16, 2, 4, 1)),
        (small, 64, 64, 80e9, (32, 1, 2, 1)),  # a device is a node
        (small, 64, 8, 4e9, (2, 16, 2, 1)),
        (large, 64, 8, 80e9, (4, 8, 2, 1)),  # 12.1 of 10 GB
        (large, 64, 8, 141e9, (8, 4, 2, 1)),
        # 24 devices do not divide a dim of 4,096, 8 do.
        (large.replace(batch_size=24), 24, 3, 80e9, (3, 8, 1, 1)),
        (large.replace(batch_size=48), 48, 6, 80e9, (3, 16, 1, 1)),
        (small.replace(batch_size=12), 24, 3, 80e9, (3, 4, 2, 1)),
        (small.replace(batch_size=24), 8, 3, 80e9, (1, 8, 1, 1)),  # 3, 3 and 2 devices
    ):
        found = layout.mesh_config(config, num_devices, nodes, memory)
        assert tuple(found.sizes(num_devices).values()) == expected
        assert found.slices == expected[0]


def test_short_rows_are_computed_together_on_a_cpu_in_small_parts_with_unrolled_layers():
    config = recipe("quickstart.gin").replace(batch_size=256)
    mesh, length = build_mesh(MeshConfig(), jax.devices("cpu")[:1]), config.data.seq_len
    assert [_laid_out(config, n)[1] for n in (1, 8)] == [256 * length // layout.PART_TOKENS, 1]

    def chosen(mesh=mesh, model=config.model, **changes) -> tuple:
        found = layout.laid_out(config.replace(model=model, **changes), mesh)
        return found.accumulation_steps, found.model.remat, found.model.scans_layers

    assert chosen() == (256 * length // layout.CPU_PART_TOKENS, "none", False)
    assert chosen(mesh.abstract_mesh) == (256 * length // layout.PART_TOKENS, "dots", True)
    for rows, parts in ((7, 7), (9, 3), (11, 11), (16, 8)):
        assert chosen(batch_size=rows)[0] == parts
    assert chosen(batch_size=17, data=config.data.replace(seq_len=64))[0] == 1
    large = config.model.replace(num_layers=layout.CPU_LAYERS + 1)
    assert chosen(model=large, accumulation_steps=1) == (1, "dots", True)
    bound = config.model.replace(remat="block", scans_layers=True)
    assert chosen(model=bound)[1:] == ("block", True)


def test_bound_fields_stay_and_what_does_not_divide_is_refused():
    config = recipe("ipttcd_340m.gin").replace(mesh=MeshConfig(seq=2), accumulation_steps=16)
    assert _laid_out(config, 8) == ((1, 4, 2, 1), 16)
    config = config.replace(mesh=MeshConfig())
    words = "parts of 1 rows, which do not divide among the 8 devices"
    refused(words, layout.laid_out, config, _mesh(config, 8))
    config = recipe("ipttcd_340m.gin").replace(batch_size=32)
    refused("among 24 devices: use 16 of them, or set", layout.mesh_config, config, 24)
    # Whole nodes, or a part of one.
    config = config.replace(batch_size=15, data=config.data.replace(seq_len=15))
    refused("among 16 devices: use 5 of them, or set", layout.mesh_config, config, 16)


def test_batches_of_the_caller_are_compared_between_processes(monkeypatch):
    compared = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("ttcd_jax.run.build.agree", lambda *call: compared.append(call))
    config = run_config("swa", data=BatchesConfig(seq_len=2), steps=9)

    def told(make):
        compared.clear()
        batches, _ = build.build_data(config, [0], make)
        assert [step for step, _ in batches.iterate(4, 6)] == [*range(4, 10)]
        return {name: digest for _, facts in compared for name, digest in facts.items()}

    first = told(lambda start: (np.full((2, 3), step) for step in range(9)))
    assert [*first] == ["batches 5 to 5", "batches 5 to 6", "batches 5 to 8"]
    later = told(lambda start: (np.full((2, 3), step - (step == 2)) for step in range(9)))
    assert [first[name] == later[name] for name in first] == [True, True, False]
    words, config = "data_workers 2 with BatchesConfig: leave", config.replace(data_workers=2)
    refused(words, build.build_data, config, [0], lambda start: [])


@pytest.mark.parametrize("kind", ["recall", "batches", "text", "mixture"])
def test_only_data_that_pack_documents_have_segment_ids(tmp_path, kind):
    texts = ["a document of several rows of text " * 4]
    corpus = corpora.text_folder(tmp_path, texts, validation_percent=0)
    text = TextConfig(corpus=corpus, tokenizer=TokenizerConfig(), seq_len=15)
    mixture = MixtureConfig(parts=(text, text), seq_len=15)
    kinds = {"recall": RECALL, "batches": BatchesConfig(seq_len=15), "text": text}
    data = (kinds | {"mixture": mixture})[kind]
    model = config_of("ipttcd", vocab_size=max(data.vocab_size, 8))
    config = run_config(model, data=data, batch_size=4)
    make = (lambda step: [np.ones((4, 16), int)]) if kind == "batches" else None
    batches, _ = build.build_data(config, range(4), make)
    ((_, batch),) = batches.iterate(0, 1)
    program = build.Program(config)
    placed, planned = program.placed(batch), program.batch
    assert ("segment_ids" in planned) == (kind in ("text", "mixture"))
    facts = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), x) for x in (placed, planned)]
    assert facts[0] == facts[1]


def test_an_abstract_model_knows_no_mesh():
    """Not even the one in use when it was first asked for: a checkpoint may be read elsewhere."""
    config = run_config(config_of("ipttcd", vocab_size=9))
    with jax.set_mesh(layout.run_mesh(config)):
        leaves = jax.tree.leaves(abstract_params(config.model))
    assert {leaf.sharding for leaf in leaves} == {None}
