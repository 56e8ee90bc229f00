"""The recipes: every one builds and is sharded, with the published sizes and budgets."""

import math
import re
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from ttcd_jax.data.sources import RecordsConfig
from ttcd_jax.run import build, start
from ttcd_jax.run.bindings import load_config
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
CONTINUED = [name for name in RUNS if name.startswith("cpt/")]


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


@pytest.mark.parametrize("name", [*RECIPES, *CONTINUED])
def test_every_recipe_divides_among_devices(name):
    config = load(name)
    mesh = AbstractMesh((1, 2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    leaves = jax.tree.leaves(build.Program(config, mesh).state)
    stored = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    # All but small vectors, and LaCT's fast weights, is in eight parts.
    share = 1.2 if "lact" in name else 1.02
    assert stored < share * sum(math.prod(leaf.shape) for leaf in leaves) / 8


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_size_and_budget(name):
    config = load(name)
    dim, num_heads, mlp_dim, rows, billions = PUBLISHED_SIZES["760m" if "760m" in name else "340m"]
    model = config.model
    assert (model.dim, model.num_heads, model.mlp_dim) == (dim, num_heads, mlp_dim)
    assert (model.num_layers, model.vocab_size, model.has_tied_head) == (24, 129_280, True)
    assert model.rope.base == 1e6
    count = num_params(config.model)
    assert count == PUBLISHED_PARAMS.get(name.removesuffix(".gin"), count)
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


# Parameters of the base, with IP-TTT, with IP-TTCD; layers; key-value heads; theta.
CONTINUED_SIZES = {
    "smollm2_360m": ((361_821_120, 365_526_720, 365_613_760), 32, 5, 1e5),
    "smollm2_1_7b": ((1_711_376_384, 1_728_194_560, 1_728_489_472), 24, 32, 1.3e5),
    "qwen3_0_6b": ((596_049_920, 600_264_704, 600_371_200), 28, 8, 1e6),
    "qwen3_1_7b": ((1_720_574_976, 1_737_393_152, 1_737_606_144), 28, 8, 1e6),
    "llama31_8b": ((8_030_261_248, 8_097_452_032, 8_097_959_936), 32, 8, 5e5),
}


def test_continued_training_has_every_method_for_every_base():
    methods = ("cpt", "swa", "ipttt", "ipttcd")
    names = {f"cpt/{method}_{base}.gin" for method in methods for base in CONTINUED_SIZES}
    assert names == {*CONTINUED}


@pytest.mark.parametrize("name", CONTINUED)
def test_continued_training_has_the_published_sizes_and_budget(name):
    config, (method, _, base) = load(name), name[4:-4].partition("_")
    counts, num_layers, kv_heads, theta = CONTINUED_SIZES[base]
    model, is_8b = config.model, base == "llama31_8b"
    assert num_params(model) == counts[{"ipttt": 1, "ipttcd": 2}.get(method, 0)]
    assert (model.num_layers, model.kv_heads, model.rope.base) == (num_layers, kv_heads, theta)
    assert model.window == (8192 if method == "swa" else None)
    if model.fast_layers:
        assert model.fast_layers == tuple(range(0, num_layers, num_layers // 4))
        assert (model.memory.chunk_size, model.memory.eta) == (2048, 0.3)
    if method == "ipttcd":
        assert (model.student_window, model.memory.normalizes_keys) == (2048, False)
    assert (config.data.seq_len, config.batch_size) == (65_536, 32 if is_8b else 16)
    tokens = config.steps * config.batch_size * config.data.seq_len
    assert abs(tokens / 10e9 - 1) < 0.001
    optimizer, schedule = config.optimizer, config.optimizer.schedule
    assert (optimizer.kind, optimizer.weight_decay, optimizer.clip_norm) == ("adamw", 0.1, 1.0)
    assert schedule.peak == (5e-6 if is_8b else 1e-5)
    decay = (schedule.warmup, schedule.decay, schedule.decay_ratio, schedule.floor_ratio)
    assert decay == (200, "cosine", None, 0.0 if is_8b else 0.1)
    header = (CONFIG_DIR / name).read_text()
    assert f"tokens: 10B     batch: {config.batch_size * 65_536:,} tokens" in header


def test_a_recipe_takes_token_records_mixed_8_to_2():
    folders = ("long_data_collections", "books")
    data = RecordsConfig(paths="DIR", folders=folders, weights=(8, 2), seq_len=32_768)
    assert load("ipttcd_760m.gin", "RECORDS='DIR'").data == data


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.rglob("*.gin")), ids=lambda path: path.stem)
def test_every_file_is_short_and_starts_with_a_header(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    bindings = [line for line in lines if line and not line.startswith(("#", "include"))]
    keys = [line.split("=")[0].strip() for line in bindings]
    assert len(keys) == len(set(keys))
    assert len(bindings) <= 18
