import math
import re
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from experiments.gin_loading import load_config
from ttcd_jax.data.mixture import RecordsConfig
from ttcd_jax.run import build, start
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.sharding.mesh import AXES
from ttcd_jax.train.state import num_params

CONFIG_DIR = Path(__file__).parents[2] / "experiments" / "configs"
RUNS = sorted(
    str(path.relative_to(CONFIG_DIR))
    for path in CONFIG_DIR.rglob("*.gin")
    if "experiments.launch" in path.read_text()
)

# The published from-scratch recipes and their ablations: they train on the user's records.
RECIPES = [name for name in RUNS if name.endswith(("_340m.gin", "_760m.gin")) or "ablation" in name]


def load(name, *params, **options):
    return load_config(RunConfig, name, params, config_dir=CONFIG_DIR, **options)


# As published, or derived from what is: dim, heads, mlp_dim, rows of a batch, billions of tokens.
PUBLISHED_SIZES = {"340m": (1024, 16, 2816, 16, 20), "760m": (1536, 24, 4096, 32, 40)}
PUBLISHED_PARAMS = {
    "swa_340m": 440_714_240,
    "full_340m": 440_714_240,
    "ipttt_340m": 444_929_024,
    "ipttcd_340m": 445_025_280,
    "deltanet_340m": 441_403_904,
    "gated_deltanet_340m": 466_963_712,
    "lact_340m": 450_747_872,
    "swa_760m": 878_126_592,
    "full_760m": 878_126_592,
    "ipttt_760m": 887_594_496,
    "ipttcd_760m": 887_733_760,
    "deltanet_760m": 879_455_232,
    "gated_deltanet_760m": 936_964_224,
    "lact_760m": 897_895_392,
}


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """A run directory for configurations that start from one: text.gin's, not yet trained."""
    directory = RunDirectory(tmp_path_factory.mktemp("other"))
    directory.claim(load("text.gin").to_dict(), "", {})
    return directory.path


@pytest.mark.parametrize("name", RUNS)
def test_every_config_builds_and_has_the_parameters_its_header_states(name, other_run, tmp_path):
    header = (CONFIG_DIR / name).read_text()
    if "%START" in header:
        inherit = start.inherited_model(RunDirectory(tmp_path))
        config = load(name, f"START='{other_run}'", inherit=inherit)
        start.plan_start(config)
    else:
        config = load(name)
    if not isinstance(config.data, RecordsConfig):  # which are the user's
        build.check(config)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert f"--gin={name}" in header
    stated = re.search(r"parameters: ([\d.]+)([KMB])", header)
    assert stated, "the header states the number of parameters"
    count = float(stated[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[stated[2]]
    assert abs(num_params(config.model) / count - 1) < 0.01


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_divides_among_devices(name):
    config = load(name)
    mesh = AbstractMesh((1, 2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    state = build.abstract_state(config, mesh)
    stored = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state)
    )
    # All but small vectors, and LaCT's fast weights, is in eight parts.
    share = 1.2 if "lact" in name else 1.02
    assert stored < share * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) / 8


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_size_and_budget(name):
    config = load(name)
    size = "760m" if "760m" in name else "340m"
    dim, num_heads, mlp_dim, rows, billions = PUBLISHED_SIZES[size]
    model = config.model
    assert (model.dim, model.num_heads, model.mlp_dim) == (dim, num_heads, mlp_dim)
    assert (model.num_layers, model.vocab_size, model.has_tied_head) == (24, 129_280, True)
    assert model.rope.base == 1e6
    expected = PUBLISHED_PARAMS.get(name.removesuffix(".gin"))
    if expected is not None:
        assert num_params(config.model) == expected
    assert (config.data.seq_len, config.batch_size) == (32_768, rows)
    tokens = config.steps * config.batch_size * config.data.seq_len
    assert abs(tokens / (billions * 1e9) - 1) < 0.01
    header = (CONFIG_DIR / name).read_text()
    assert f"tokens: {billions}B     batch: {rows * 32_768:,} tokens" in header
    optimizer = config.optimizer
    assert (optimizer.kind, optimizer.weight_decay, optimizer.clip_norm) == ("muon", 0.1, 1.0)
    assert (optimizer.schedule.peak, optimizer.schedule.warmup) == (3e-3, 500)


def test_every_method_has_a_recipe_of_both_sizes_and_the_paper_its_ablations():
    assert {f"{name}.gin" for name in PUBLISHED_PARAMS} <= set(RUNS)
    base = load("ipttcd_340m.gin")
    assert (base.model.window, base.model.student_window) == (2048, 1024)
    assert base.model.fast_layers == (0, 6, 12, 18)
    assert (base.model.memory.chunk_size, base.model.memory.eta) == (1024, 0.3)
    changes = {}
    for name in (name for name in RECIPES if "ablation" in name):
        config = load(name)
        assert config.replace(model=base.model) == base
        memory, model = config.model.memory, config.model
        convs = memory.has_teacher_conv, memory.has_student_conv, memory.has_proj
        changes[name.split("/")[1]] = (convs, len(model.fast_layers), memory.chunk_size)
    all_on = (True, True, True)
    assert changes == {
        "conv.gin": ((True, True, False), 4, 1024),
        "proj.gin": ((False, False, True), 4, 1024),
        "neither.gin": ((False, False, False), 4, 1024),
        "1_layer.gin": (all_on, 1, 1024),
        "2_layers.gin": (all_on, 2, 1024),
        "8_layers.gin": (all_on, 8, 1024),
        "chunk_512.gin": (all_on, 4, 512),
        "chunk_2048.gin": (all_on, 4, 2048),
    }


def test_the_8b_model_is_the_base_model_and_its_memories():
    config = load("ipttcd_8b.gin")
    model = config.model
    # Of a fast layer: P, the rate's vector, two convolutions.
    memory = model.dim**2 + model.dim + 2 * model.memory.num_taps * model.mlp_dim
    assert num_params(config.model) == 8_190_735_360 + len(model.fast_layers) * memory  # Qwen3-8B's


def test_a_recipe_takes_token_records_mixed_8_to_2():
    data = RecordsConfig(
        paths="DIR",
        folders=("long_data_collections", "books"),
        weights=(8, 2),
        seq_len=32_768,
    )
    assert load("ipttcd_760m.gin", "RECORDS='DIR'").data == data


FILES = sorted(str(path.relative_to(CONFIG_DIR)) for path in CONFIG_DIR.rglob("*.gin"))


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_short_and_starts_with_a_header(name):
    lines = (CONFIG_DIR / name).read_text().splitlines()
    assert lines[0].startswith("# ")
    bindings = [line for line in lines if line and not line.startswith(("#", "include"))]
    keys = [line.split("=")[0].strip() for line in bindings]
    assert len(keys) == len(set(keys))
    assert len(bindings) <= 18
