"""The recipes: every one builds and is sharded, with the published sizes and budgets."""

import importlib
import math
import re
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from small_models import recipe

from ttcd_jax.commands.cli import CONFIG_DIR
from ttcd_jax.commands.study.runs import StudyConfig
from ttcd_jax.data.sources import RecordsConfig
from ttcd_jax.data.synthetic import SyntheticConfig
from ttcd_jax.run import build, start
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.sharding.mesh import AXES
from ttcd_jax.train.state import num_params

RUNS = sorted(
    str(path.relative_to(CONFIG_DIR))
    for path in CONFIG_DIR.rglob("*.gin")
    if "experiments.launch" in path.read_text()
)

# The published from-scratch recipes and their ablations: they train on the user's records.
RECIPES = [name for name in RUNS if name.endswith(("_340m.gin", "_760m.gin")) or "ablation" in name]
CONTINUED = [name for name in RUNS if name.startswith("cpt/") and "/cpu/" not in name]


METHOD_LABELS = {
    **{"swa": "SWA", "full": "full attention", "ipttcd": "IP-TTCD", "ipttt": "IP-TTT"},
    **{"ipttcd_ideal": "ideal IP-TTCD", "lact": "LaCT", "deltanet": "DeltaNet"},
    **{"gated_deltanet": "Gated DeltaNet", "deltanet_hybrid": "SWA + DeltaNet"},
    "ipttcd_stream": "IP-TTCD of the stream",
}
METHODS = ("swa", "full", "ipttt", "ipttcd", "deltanet", "gated_deltanet", "lact")
# As published, or derived from what is: dim, heads, mlp_dim, rows of a batch, billions of tokens;
# parameters by method.
PUBLISHED = {"340m": (1024, 16, 2816, 16, 20), "760m": (1536, 24, 4096, 32, 40)}
COUNTS = {
    "340m": (440714240, 440714240, 444929024, 445025280, 441403904, 466963712, 450747872),
    "760m": (878126592, 878126592, 887594496, 887733760, 879455232, 936964224, 897895392),
}
# Of continued training: layers, key-value heads, theta.
CONTINUED_SIZES = {
    "smollm2_360m": (32, 5, 1e5),
    "smollm2_1_7b": (24, 32, 1.3e5),
    "qwen3_0_6b": (28, 8, 1e6),
    "qwen3_1_7b": (28, 8, 1e6),
    "llama31_8b": (32, 8, 5e5),
}


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """A run directory for configurations that start from one: text.gin's, not yet trained."""
    directory = RunDirectory(tmp_path_factory.mktemp("other"))
    directory.claim(recipe("text.gin").to_dict(), "", {})
    return directory.path


@pytest.mark.parametrize("name", RUNS)
def test_every_config_builds_and_has_the_parameters_its_header_states(name, other_run, tmp_path):
    header = (CONFIG_DIR / name).read_text()
    if "%START" in header:
        inherit = start.inherited_model(RunDirectory(tmp_path))
        config = recipe(name, f"START='{other_run}'", inherit=inherit)
        start.plan_start(config)
    else:
        config = recipe(name)
    is_users = name.startswith(("cpt/", "flagship/")) or isinstance(config.data, RecordsConfig)
    if not is_users:  # files of records, or a tokenizer
        build.check(config)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert f"--gin={name}" in header
    stated = re.search(r"parameters: ([\d.]+)([KMB])", header)
    assert stated, "the header states the number of parameters"
    unit, digits = {"K": 1e3, "M": 1e6, "B": 1e9}[stated[2]], len(stated[1].partition(".")[2])
    assert f"{num_params(config.model) / unit:.{digits}f}" == stated[1]


# What a label says beyond its method: in the name of a file, in its first line.
SAID = {
    " + delta rule": ("delta", "delta rule"),
    " + decay": ("forgetting", "that forgets"),
    ", errors of the teacher alone": ("teacher", "view"),
    ", learned values": ("learned", "learned values"),
    ", eta = 0": ("eta0", "writes nothing"),
    ", no gap": ("no_gap", "equal windows"),
    ", frozen": ("frozen", "student alone"),
}


@pytest.mark.parametrize("name", [name for name in RUNS if name != "continue.gin"])
def test_label_name_and_first_line_of_a_recipe_say_what_it_is(name):
    model, stem = recipe(name).model, Path(name).stem
    first, memory = (CONFIG_DIR / name).read_text().splitlines()[0], model.settings
    facts = {x: getattr(memory, x, None) for x in ("eta", "corrects_errors", "half_lives")}
    error, is_off = getattr(memory, "error", None), facts["eta"] == 0
    is_distilled = model.method.startswith("ipttcd") and error != "learned"
    is_frozen = getattr(memory, "is_frozen", False)
    is_said = {
        " + delta rule": bool(facts["corrects_errors"]) and not is_off,
        " + decay": bool(facts["half_lives"]) and not is_off,
        ", errors of the teacher alone": error == "teacher",
        ", learned values": error == "learned",
        ", eta = 0": is_off,
        ", no gap": is_distilled and not is_frozen and model.window == model.student_window,
        ", frozen": is_frozen,
    }
    words = "".join(x for x in SAID if is_said[x])
    assert model.label == f"{METHOD_LABELS[model.method]}{words}"
    for word, (part, text) in SAID.items():
        assert (text in first) == is_said[word], first
        is_named = re.search(f"_{part}(_|$)", stem) is not None
        assert is_named == is_said[word] or not stem.startswith(("ipttcd", "ipttt")), stem


@pytest.mark.parametrize("name", [*RECIPES, *CONTINUED])
def test_every_recipe_divides_among_devices(name):
    config = recipe(name)
    mesh = AbstractMesh((1, 2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    leaves = jax.tree.leaves(build.Program(config, mesh).state)
    stored = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    # All but small vectors, and LaCT's fast weights, is in eight parts.
    share = 1.2 if "lact" in name else 1.02
    assert stored < share * sum(math.prod(leaf.shape) for leaf in leaves) / 8


def _budget(name, config):
    """(row length, rows, billions of tokens), (optimizer, weight decay, clipped norm) and (peak,
    warmup) of a recipe, whose header says the tokens."""
    length, rows, optimizer = config.data.seq_len, config.batch_size, config.optimizer
    billions = round(config.steps * rows * length / 1e9, 2)
    words = f"tokens: {billions:.0f}B     batch: {rows * length:,} tokens"
    assert words in (CONFIG_DIR / name).read_text()
    updates = optimizer.kind, optimizer.weight_decay, optimizer.clip_norm
    return (length, rows, billions), updates, (optimizer.schedule.peak, optimizer.schedule.warmup)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_size_and_budget(name):
    config, size = recipe(name), "760m" if "760m" in name else "340m"
    *sizes, rows, billions = PUBLISHED[size]
    model, method = config.model, name.removesuffix(f"_{size}.gin")
    assert method not in METHODS or num_params(model) == COUNTS[size][METHODS.index(method)]
    assert [model.dim, model.num_heads, model.mlp_dim] == sizes
    assert (model.num_layers, model.vocab_size, model.has_tied_head) == (24, 129_280, True)
    assert model.rope.base == 1e6
    assert _budget(name, config) == ((32_768, rows, billions), ("muon", 0.1, 1.0), (3e-3, 500))


def test_every_method_has_its_recipes_and_the_paper_its_ablations():
    assert {f"{method}_{size}.gin" for method in METHODS for size in PUBLISHED} <= set(RUNS)
    methods = ("cpt", "swa", "ipttt", "ipttcd")
    assert {f"cpt/{x}_{base}.gin" for x in methods for base in CONTINUED_SIZES} == {*CONTINUED}
    base = recipe("ipttcd_340m.gin")
    assert (base.model.window, base.model.student_window) == (2048, 1024)
    assert base.model.fast_layers == (0, 6, 12, 18)
    assert (base.model.memory.chunk_size, base.model.memory.eta) == (1024, 0.3)
    changes = {}
    for name in (name for name in RECIPES if "ablation" in name):
        config = recipe(name)
        assert config.replace(model=base.model) == base
        memory, model = config.model.memory, config.model
        convs = memory.has_teacher_conv, memory.has_student_conv, memory.has_proj
        changes[name.split("/")[1]] = (convs, len(model.fast_layers), memory.chunk_size)
    all_on = (True, True, True)
    assert changes == {
        "conv.gin": ((True, True, False), 4, 1024),
        "proj.gin": ((False, False, True), 4, 1024),
        "neither.gin": ((False, False, False), 4, 1024),
        **{f"{n}_layer{'s' * (n > 1)}.gin": (all_on, n, 1024) for n in (1, 2, 8)},
        **{f"chunk_{n}.gin": (all_on, 4, n) for n in (512, 2048)},
    }


@pytest.mark.parametrize("name", CONTINUED)
def test_continued_training_has_the_published_sizes_and_budget(name):
    config, (method, _, base) = recipe(name), name[4:-4].partition("_")
    model, schedule, is_8b = config.model, config.optimizer.schedule, base == "llama31_8b"
    assert (model.num_layers, model.kv_heads, model.rope.base) == CONTINUED_SIZES[base]
    assert model.window == (8192 if method == "swa" else None)
    if model.fast_layers:
        assert model.fast_layers == tuple(range(0, model.num_layers, model.num_layers // 4))
        assert (model.memory.chunk_size, model.memory.eta) == (2048, 0.3)
    if method == "ipttcd":
        assert (model.student_window, model.memory.normalizes_keys) == (2048, False)
    tokens, rates = (65_536, 32 if is_8b else 16, 10.0), (5e-6 if is_8b else 1e-5, 200)
    assert _budget(name, config) == (tokens, ("adamw", 0.1, 1.0), rates)
    decay = (schedule.decay, schedule.decay_ratio, schedule.floor_ratio)
    assert decay == ("cosine", None, 0.0 if is_8b else 0.1)


def test_a_recipe_takes_token_records_mixed_8_to_2():
    folders = ("long_data_collections", "books")
    data = RecordsConfig(paths="DIR", folders=folders, weights=(8, 2), seq_len=32_768)
    assert recipe("ipttcd_760m.gin", "RECORDS='DIR'").data == data


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.rglob("*.gin")), ids=lambda path: path.stem)
def test_every_file_is_short_and_starts_with_a_header(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    bindings = [line for line in lines if line and not line.startswith(("#", "include"))]
    keys = [line.split("=")[0].strip() for line in bindings]
    assert len(keys) == len(set(keys))
    assert len(bindings) <= 18


def test_the_recipes_of_a_study_have_the_same_data(other_run):
    """It evaluates all of them on one text: rows of another length would be other data."""
    for name in ("gap_values", "not_static"):
        importlib.import_module(f"experiments.studies.{name}")
    for path in sorted((CONFIG_DIR / "study").glob("*.gin")):
        if "StudyConfig.recipes" in path.read_text():
            goes_on = path.stem.startswith(("continued", "real_model"))
            params = [f"RunConfig.start_from='{other_run}'"] if goes_on else []
            found = load_config(StudyConfig, str(path), [], config_dir=CONFIG_DIR).runs(params)
            data = [x.config.data for x in found.values()]
            drawn = [type(x) if isinstance(x, SyntheticConfig) else x for x in data]
            assert len({*drawn}) == 1, path.name
