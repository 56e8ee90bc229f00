"""The metrics of a run besides its loss, and the gap between student and teacher among them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, randomize, refused
from flax import nnx
from small_models import config_of, run_config

from ttcd_jax import BatchesConfig, OptimizerConfig, Precision, RunConfig, Transformer, train_run
from ttcd_jax.memory.distillation import summary
from ttcd_jax.run import build
from ttcd_jax.run.config import upgraded
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.sharding.mesh import MeshConfig
from ttcd_jax.train import metrics as step_metrics
from ttcd_jax.train.metrics import IN_STEP, METRICS, RESERVED, Metric
from ttcd_jax.train.optimizer import MuonSettings
from ttcd_jax.train.state import with_params

MODEL = config_of("ipttcd", num_layers=2, fast_layers=(1,), precision=Precision())
CONFIG = run_config(MODEL, data=BatchesConfig(seq_len=12), steps=5, batch_size=4, log_every=2)
WITH_GAP = (*IN_STEP, "distillation")
NAMES = ["change", "closer", "cosine", "gap", "gap_both", "gap_on", "loss", "loss_on"]
NAMES += ["window_share"]


def _batches(start):
    for step in itertools.count(start):
        yield np.random.default_rng(step).integers(0, 8, (4, 13))


def _records(run_dir, **changes):
    train_run(CONFIG.replace(**changes), run_dir, _batches)
    return read_metrics(run_dir / "metrics.jsonl")


def test_a_run_logs_distances_and_its_losses_stay_the_same_to_the_last_bit(tmp_path):
    plain = _records(tmp_path / "plain")
    logged = _records(tmp_path / "logged", metrics=WITH_GAP)
    assert [record["step"] for record in logged] == [2, 4, 5]
    for record, other in zip(logged, plain, strict=True):
        found = {name: x for name, x in record.items() if name.startswith("distillation/")}
        assert [*found] == [f"distillation/layer_1/{name}" for name in NAMES]
        assert all(x is not None for name, x in found.items() if name != "loss_on")
        for name in ("loss", "grad_norm", "memory_ratio/0"):
            assert record[name] == other[name]
        assert record.keys() - found.keys() == other.keys()


@pytest.mark.parametrize(
    ("memory", "warmup"), [({"eta": 0.0}, 0), ({"teacher_conv_init": "zeros"}, 3)]
)
def test_what_cannot_be_measured_is_null_and_a_warning(tmp_path, caplog, memory, warmup):
    model = MODEL.replace(memory=MODEL.settings.replace(**memory))
    changes = {"model": model, "memory_warmup": warmup, "metrics": WITH_GAP}
    logged = _records(tmp_path, log_every=1, **changes)
    assert [record["step"] for record in logged] == [1, 2, 3, 4, 5]
    nulls = {name for record in logged for name, value in record.items() if value is None}
    assert nulls
    texts = [x.partition("null in the metrics: ")[2] for x in caplog.messages]
    assert sorted(name for text in texts for name in text.split(", ") if text) == sorted(nulls)


def test_parts_give_the_measures_of_the_whole_batch_without_its_padding(float64):
    model = config_of("ipttcd")
    rng = np.random.default_rng(0)
    ids = np.repeat([[1, 2, 0]], [5, 6, 3], axis=1).repeat(4, axis=0)
    ids[2] = 1
    batch = {"tokens": rng.integers(0, 11, (4, 14)), "segment_ids": ids}
    params = nnx.to_pure_dict(nnx.state(randomize(Transformer, model), nnx.Param))
    measures = (step_metrics.programs(["distillation"], model, count)[0] for count in (1, 2))
    whole, parts = (jax.jit(measure)(params, batch) for measure in measures)
    assert_close(parts, whole)
    found = with_params(model, params).distillation(*map(jnp.asarray, batch.values()))
    measures = summary(found, jnp.asarray(ids > 0))
    expected = {f"distillation/layer_0/{name}": x[0] for name, x in measures.items()}
    assert_close(whole, expected)
    padded = summary(found)
    assert abs(padded["gap"][0] - expected["distillation/layer_0/gap"]) > 1e-4


def test_they_are_measured_where_they_are_due_on_the_parameters_of_the_loss():
    seen = []
    step = step_metrics.measured(
        lambda state, batch: ({"params": state["params"] + 1}, {"loss": batch["tokens"]}),
        [lambda params, batch: {"gap": params * 10 + batch["tokens"]}],
        start=3,
        every=5,
        last=6,
    )
    state = {"params": 3}
    for batch in range(4):
        state, metrics = step(state, {"tokens": jnp.array(batch)})
        seen.append({name: int(x) for name, x in metrics.items()})
    assert seen == [{"loss": 0}, {"loss": 1, "gap": 41}, {"loss": 2, "gap": 52}, {"loss": 3}]


def test_metrics_and_trackers_that_there_are_not_are_refused():
    no_teacher = "method 'ipttt' has no student and teacher to compare"
    for words, changes in {
        no_teacher: {"model": config_of("ipttt"), "metrics": WITH_GAP},
        "no metric is called 'gate_means'; did you mean 'gate_mean'": {"metrics": ("gate_means",)},
        "names one twice": {"metrics": IN_STEP * 2},
        "no tracker is called 'wandbs'; did you mean 'wandb'": {"trackers": ("wandbs",)},
    }.items():
        refused(words, CONFIG.replace, **changes)
    for name in ("loss", "step", "a/b", "mfu"):
        refused("a metric cannot be called", Metric, name, lambda _: 0.0)


@pytest.mark.parametrize("is_in_step", [True, False])
def test_what_is_no_number_is_refused_before_anything_is_compiled(monkeypatch, is_in_step):
    for words, found in (
        ("metric odd is float32 [2, 3]", lambda: jnp.ones((2, 3))),
        ("metric odd/a is 'text'", lambda: {"a": "text"}),
        ("metric odd is None", lambda: None),
        ("metric odd is complex64", lambda: jnp.ones(2) * 1j),
    ):
        metric = Metric("odd", lambda *_, x=found: x(), is_in_step)
        monkeypatch.setitem(METRICS, "odd", metric)
        program = build.Program(CONFIG.replace(metrics=("odd",)))
        refused(words, program.step if is_in_step else program.measures)


def test_metrics_of_ones_own_are_numbers_of_the_step_and_its_parts(tmp_path, monkeypatch):
    count = Metric("count", lambda forward: forward.batch["tokens"].shape[0], is_in_step=True)
    own = Metric("own", lambda model, batch, parts: {"nan": jnp.nan, "parts": parts})
    monkeypatch.setitem(METRICS, "count", count)
    monkeypatch.setitem(METRICS, "own", own)
    changes = {"metrics": ("count", "own"), "accumulation_steps": 2, "mesh": MeshConfig()}
    for record in _records(tmp_path, **changes):
        found = {name: x for name, x in record.items() if name not in RESERVED}
        assert found == {"count": 2, "own/nan": None, "own/parts": 2}


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize("momentum", [0.95, 0.5])
def test_a_configuration_of_an_earlier_version_is_read(logs, momentum):
    muon = {"momentum": momentum, "is_nesterov": True, "orthogonalization": "bfloat16"}
    optimizer = OptimizerConfig(kind="muon")
    old = CONFIG.replace(optimizer=optimizer).to_dict()
    del old["metrics"], old["optimizer"]["settings"]
    old = old | {"logs_distillation": logs, "optimizer": old["optimizer"] | muon}
    settings = None if momentum == 0.95 else MuonSettings(momentum=momentum)
    optimizer, metrics = optimizer.replace(settings=settings), WITH_GAP if logs else IN_STEP
    expected = CONFIG.replace(metrics=metrics, optimizer=optimizer)
    assert RunConfig.from_dict(upgraded(old)) == expected
