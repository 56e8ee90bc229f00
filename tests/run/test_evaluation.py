"""Evaluation during training happens when it is due and compiles once."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from checks import randomize
from flax import nnx
from small_models import config_of

from experiments import cli
from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.errors import UserError
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.precision import Precision
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.run.evaluation import evaluation_callbacks
from ttcd_jax.tasks.perplexity import Perplexity
from ttcd_jax.tasks.recall import Recall
from ttcd_jax.train.optimizer import OptimizerConfig, ScheduleConfig
from ttcd_jax.train.state import TrainState

CONFIG = RunConfig(
    model=config_of("ipttcd", precision=Precision()),
    data=RecallConfig(num_slots=8, num_keys=4, num_values=4),
    optimizer=OptimizerConfig(schedule=ScheduleConfig(peak=1e-2)),
    steps=5,
    batch_size=2,
    evaluate_every=2,
    evaluations=(Recall(),),
)


@pytest.fixture
def run_dir(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.claim(CONFIG.to_dict(), "", {})
    return directory


def test_tasks_run_every_so_many_steps_and_after_the_last(run_dir):
    model = randomize(Transformer, CONFIG.model)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = TrainState(params=params, opt_state=(), step=jnp.array(0))
    written, compiled = {}, []

    def note(event: str, duration_secs: float, **kwargs: str | int):
        if event.endswith("backend_compile_duration"):
            compiled.append(kwargs["fun_name"])

    (callback,) = evaluation_callbacks(CONFIG, run_dir, written.__setitem__, 2)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for step in (2, 3, 4, 5):  # at 3 the run is stopped
            callback.call(step, state)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert callback.every == 2
    assert [*written] == [2, 4, 5]
    assert (
        compiled.count("jit(_forward_scores)") == 2
    )  # with the memory and without, for all evaluations
    name = [*written[2]][-1]
    config = CONFIG.replace(keep_best=1, best_metric=f"{name}x")
    (callback,) = evaluation_callbacks(config, run_dir, written.__setitem__, 2)
    with pytest.raises(
        UserError, match=re.escape(f"best_metric '{name}x'; did you mean '{name}'?")
    ):
        callback.call(2, state)


def test_a_run_is_evaluated_on_the_same_cases_to_its_end(run_dir):
    evaluation_callbacks(CONFIG, run_dir, print, 2)
    evaluation_callbacks(CONFIG, run_dir, print, 1)  # another batch, the same rows
    evaluation_callbacks(CONFIG.replace(evaluations=(Recall(max_rows=3),)), run_dir, print, 2)
    path = run_dir.path / "evaluations.json"
    digests = json.loads(path.read_text())
    assert len(digests) == 2
    path.write_text(json.dumps({name: {"": "of other text"} for name in digests}))
    with pytest.raises(UserError, match=r"the text that task recall measures .* on changed since"):
        evaluation_callbacks(CONFIG, run_dir, print, 2)


def test_a_run_evaluates_nothing_unless_asked(run_dir):
    assert evaluation_callbacks(CONFIG.replace(evaluate_every=None), run_dir, print, 2) == []


def test_a_task_that_does_not_fit_is_refused_before_the_first_step(run_dir):
    with pytest.raises(UserError, match="trained on recall data, not on text: measure it by"):
        evaluation_callbacks(CONFIG.replace(evaluations=(Perplexity(),)), run_dir, print, 2)
    params = ["RunConfig.evaluations=(@Perplexty(),)"]
    with pytest.raises(UserError, match="did you mean 'Perplexity'"):
        load_config(RunConfig, "quickstart.gin", params, config_dir=cli.CONFIG_DIR)


def test_evaluations_are_tasks_with_options():
    params = ["RunConfig.evaluate_every=2", "RunConfig.evaluations=(@Recall(), @Perplexity())"]
    params += ["Recall.max_rows=7"]
    config = load_config(RunConfig, "quickstart.gin", params, config_dir=cli.CONFIG_DIR)
    assert [(task.name, task.max_rows) for task in config.evaluations] == [
        ("recall", 7),
        ("ppl", 512),
    ]
    assert RunConfig.from_dict(config.to_dict()) == config
    with pytest.raises(UserError, match="has tasks recall, recall"):
        CONFIG.replace(evaluations=(Recall(), Recall(max_rows=3)))
