"""A run that starts from another: what it takes, draws, leaves, refuses, and its first logits."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, refused
from corpora import text_file
from flax.traverse_util import flatten_dict
from orbax.checkpoint import StandardCheckpointer
from small_models import byte_model, config_of, run_config
from tiny_run import save_text_model

from ttcd_jax import MemoryConfig, OptimizerConfig, Precision, RunConfig
from ttcd_jax.data.sources import TextConfig
from ttcd_jax.data.tokenizer import TokenizerConfig, bytes_as_json, train_tokenizer
from ttcd_jax.errors import CheckpointError, DataError
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.run import build
from ttcd_jax.run.directory import RunDirectory, load_params, run_tokenizer
from ttcd_jax.run.layout import run_mesh
from ttcd_jax.run.start import inherited_model, plan_start, started_state
from ttcd_jax.train.checkpoint import Checkpoints
from ttcd_jax.train.layers_on_disk import by_name, stored_params, unstacked
from ttcd_jax.train.state import with_params

SIZES = {"vocab_size": 8, "dim": 16, "num_layers": 6, "mlp_dim": 24, "window": 8}
PLAIN = config_of("swa", **SIZES, student_window=4, init_std=0.3, precision=Precision())
# As configs/method/ipttcd_continued.gin.
IDENTITY = MemoryConfig(
    **{"chunk_size": 4, "output": "teacher_raw", "normalizes_keys": False},
    **{"teacher_conv_init": "identity", "student_conv_init": "zeros"},
)
GROWN = {
    "ipttcd": {"memory": IDENTITY},
    "ipttt": {"memory": TargetMemoryConfig(chunk_size=4, target="embedding")},
}
TOKENS = np.random.default_rng(1).integers(0, 8, (2, 30))


def _config(model, **changes) -> RunConfig:
    fields = {"optimizer": OptimizerConfig(kind="muon"), "steps": 1, "batch_size": 1}
    return run_config(model, **fields | changes)


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with jax.set_mesh(run_mesh(_config(PLAIN))):
        yield


@pytest.fixture(scope="module")
def run_of(mesh, tmp_path_factory):
    """A run directory of a model at step 3: `run_of(model)`."""

    def run_of(model):
        config = _config(model, seed=7)
        directory = RunDirectory(tmp_path_factory.mktemp("runs"))
        directory.claim(config.to_dict(), "", {})
        with contextlib.closing(Checkpoints(directory.checkpoints, model=model)) as checkpoints:
            checkpoints.save(3, dict(build.Program(config).fresh_state()))
        return directory.path

    return run_of


@pytest.fixture(scope="module")
def plain(run_of):
    return str(run_of(PLAIN))


@pytest.fixture(scope="module")
def run_of_window(run_of, plain):
    """Model, run directory and logits of a plain transformer, with a window and without."""
    full = PLAIN.replace(method="full", window=None)
    pairs = (PLAIN, plain), (full, str(run_of(full)))
    return {x.window: (x, path, logits(x, load_params(path)[0])) for x, path in pairs}


def logits(model, params):
    tokens = jnp.asarray(TOKENS)
    return jax.jit(lambda params: with_params(model, params)(tokens))(params)


def test_parameters_are_float32_unless_bound_by_name(run_of, tmp_path, caplog):
    narrow = PLAIN.replace(precision=Precision(param="bfloat16", compute="bfloat16"))
    source = str(run_of(narrow))
    model = inherited_model(RunDirectory(tmp_path / "new"))("model", {"start_from": source})
    assert model == narrow.replace(precision=Precision(compute="bfloat16"))
    build.check(_config(model))
    assert not caplog.text
    build.check(_config(narrow))  # bound, or of an older run
    assert "parameters and moments are bfloat16" in caplog.text
    build.check(
        _config(config_of("ipttcd", memory=MemoryConfig(chunk_size=4, is_conv_causal=False)))
    )
    assert "a prediction depend on tokens that come after it" in caplog.text
    _, _, state = started_state(build.Program(_config(model, start_from=source)))
    assert {x.dtype for x in jax.tree.leaves(state["params"])} == {jnp.dtype("float32")}


def test_tokens_beyond_the_vocabulary_of_a_checkpoint_are_refused_where_they_occur(caplog):
    narrow = _config(PLAIN.replace(vocab_size=5))  # of 8 that recall may draw
    refused("vocab_size 5 is smaller than the data's 8: set Tran", build.check, narrow)
    config = narrow.replace(start_from="theirs")  # has a vocabulary of its own
    build.check(config)
    assert "a batch with one of the other tokens is refused" in caplog.text
    batches, _ = build.build_data(config, range(1))
    refused("outside the vocabulary of 5 tokens", list, batches.iterate(0, 1), error=DataError)


def test_layers_are_stored_one_by_one_with_their_moments(run_of):
    model = PLAIN.replace(method="ipttcd", fast_layers=(0, 3), memory=IDENTITY)
    run_dir = run_of(model)
    with StandardCheckpointer() as reader:
        items = {
            item: reader.metadata(run_dir / "checkpoints" / "3" / item).item_metadata.tree
            for item in ("params", "train")
        }
    params, rest = (flatten_dict(items[item], sep="/") for item in ("params", "train"))
    assert params["layers/0/mlp/down"].shape == params["layers/5/mlp/down"].shape == (24, 16)
    assert not [name for name in (*params, *rest) if "group" in name]
    stored = {name.removeprefix("layers/") for name in params if name.startswith("layers/")}
    assert {name[0] for name in stored} == set("012345")
    assert {name.partition("/layers/")[2] for name in rest} - {""} == stored


@pytest.mark.parametrize(
    ("method", "fast_layers", "window"),
    [
        *(("ipttcd", (0, 1, 4), 8), ("ipttcd", tuple(range(6)), None)),
        *(("ipttt", (0, 3), 8), ("ipttt", (0, 1, 4), None)),
    ],
)
def test_a_plain_run_grows_with_the_same_first_logits(run_of_window, method, fast_layers, window):
    model, run_dir, trained = run_of_window[window]
    fields = GROWN[method] | {"method": method, "fast_layers": fast_layers}
    grown = model.replace(scans_layers=window is None, **fields)
    step, _, state = started_state(build.Program(_config(grown, start_from=run_dir)))
    assert step == 3
    np.testing.assert_array_equal(logits(grown, state["params"]), trained)


def test_what_is_lacking_is_drawn_as_a_fresh_run_draws_it_and_listed(plain):
    model = PLAIN.replace(method="ipttcd", fast_layers=(0, 1, 4), memory=IDENTITY)
    config = _config(model, start_from=plain, seed=5)
    plan = plan_start(config)
    assert plan.dropped == ()
    assert len(plan.taken) == len(stored_params(PLAIN))
    assert "initialised: layers/0,1,4/mlp/proj" in plan.lines()
    assert len(plan.initialised) == 12  # P, the rate, two convolutions
    changed = {"changed: method: swa -> ipttcd", "changed: fast_layers: [] -> [0, 1, 4]"}
    assert {x for x in plan.lines() if x.startswith("changed")} == changed
    state = started_state(build.Program(config))[-1]
    fresh = build.Program(config).fresh_state()
    assert state["params"]["group_0"]["block_0"]["mlp"]["proj"].shape == (2, 16, 16)
    ours, theirs = (by_name(x["params"]) for x in (state, fresh))
    assert ours.keys() == theirs.keys()
    for name in (name for name in ours if not name.endswith("norm")):  # norms are constant
        is_drawn = name.endswith(("proj", "rate", "teacher_conv", "student_conv"))
        assert is_drawn == np.array_equal(ours[name], theirs[name]), name
    assert_same(state["opt_state"], fresh["opt_state"])
    assert state["step"] == 0


def test_text_of_another_tokenizer_is_refused_unless_the_embedding_is_dropped(tmp_path):
    save_text_model(tmp_path / "run", byte_model())
    (tmp_path / "other.json").write_text(train_tokenizer(["some words"], 258))
    (tmp_path / "a.txt").write_text("some words")
    corpus = text_file(tmp_path / "a.txt")
    data = TextConfig(corpus=corpus, tokenizer=TokenizerConfig(), seq_len=8)
    config = _config(byte_model(), data=data, start_from=str(tmp_path / "run"))
    assert plan_start(config).initialised == ()
    other = TokenizerConfig(kind="json", path=str(tmp_path / "other.json"))
    config = config.replace(data=data.replace(tokenizer=other))
    words = "run' has learned tokens of bytes, |other.json: set TokenizerConfig.kind = 'byte'"
    refused(words, plan_start, config)
    assert plan_start(config.replace(start_drops=("embedding",))).initialised == ("embedding",)
    # Documents that nobody chose to begin and end otherwise than the other run's are refused.
    own = TokenizerConfig(kind="json", path=str(tmp_path / "other.json"))
    base = _config(byte_model(), data=data.replace(tokenizer=own.replace(bos_id=7, eos_id=8)))
    RunDirectory(tmp_path / "own").claim(base.to_dict(), "", {})
    config = config.replace(data=data.replace(tokenizer=own), start_from=str(tmp_path / "own"))
    refused("with tokens 7 and 8, |set TokenizerConfig.bos_id = 7, |eos_id = 8", plan_start, config)
    chosen = data.replace(tokenizer=own.replace(bos_id=7, eos_id=9))
    assert "changed: tokenizer eos_id: 8 -> 9" in plan_start(config.replace(data=chosen)).lines()
    config = config.replace(data=data.replace(tokenizer=other), start_from=str(tmp_path / "run"))
    # An export of bytes has them as a file, and an import of that goes on with bytes.
    (tmp_path / "other.json").write_text(bytes_as_json())
    assert plan_start(config).initialised == ()


def test_a_tokenizer_file_that_changed_is_refused_wherever_it_is_read(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(train_tokenizer(["some words"], 258))
    (tmp_path / "a.txt").write_text("some words " * 9)
    own = TokenizerConfig(kind="json", path=str(path))
    data = TextConfig(corpus=text_file(tmp_path / "a.txt"), tokenizer=own, seq_len=8)
    directory, config = RunDirectory(tmp_path / "run"), _config(byte_model(), data=data)
    directory.claim(config.to_dict(), "", data.rows(0)[1])
    assert run_tokenizer(directory).vocab_size == 258
    path.write_text(train_tokenizer(["other words"], 259))
    refused("own.json is another tokenizer|restore", run_tokenizer, directory, error=DataError)


def test_what_is_left_over_or_has_another_shape_is_refused_unless_allowed_by_name(run_of):
    fast = PLAIN.replace(method="ipttcd", fast_layers=(0, 3), memory=IDENTITY)
    run_dir = str(run_of(fast))
    config = _config(PLAIN.replace(vocab_size=11), start_from=run_dir)
    drops = ("layers/*/mlp/proj", "layers/*/mlp/rate", "*_conv")
    words = "8 only in the checkpoint: layers/0/mlp/proj|RunConfig.start_drops"
    refused(words, plan_start, config.replace(start_drops=("embedding",)), error=CheckpointError)
    words = "another shape: embedding (8, 16) not (11, 16)"
    refused(words, plan_start, config.replace(start_drops=drops), error=CheckpointError)
    words = "'layers/*/prj' names no parameter of |layers/0,1,2,3"
    refused(words, plan_start, config.replace(start_drops=(*drops, "layers/*/prj")))
    config = config.replace(start_drops=(*drops, "embedding"))
    plan = plan_start(config)
    assert (len(plan.dropped), plan.initialised) == (9, ("embedding",))
    assert {"initialised: embedding", "dropped: layers/0,3/mlp/rate"} < {*plan.lines()}
    params, stored = started_state(build.Program(config))[-1]["params"], load_params(run_dir)[0]
    ours, theirs = unstacked(config.model, by_name(params)), unstacked(fast, by_name(stored))
    assert ours["embedding"].shape == (11, 16)
    assert_same(ours["layers/0/mlp/down"], theirs["layers/0/mlp/down"])
