"""When a run saves and what it keeps: the clock of several processes, the best checkpoints."""

import signal
import time

import orbax.checkpoint as ocp
import pytest
from small_models import config_of

from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.errors import UserError
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.evaluation import best_scores
from ttcd_jax.run.training import _Signals
from ttcd_jax.train.optimizer import OptimizerConfig


@pytest.mark.parametrize("index", [0, 1])
def test_processes_agree_on_the_step_by_the_clock_of_the_first(monkeypatch, index):
    stored, now = {}, [0.0]

    class Client:
        def key_value_set(self, key, value, allow_overwrite):
            stored[key] = value

        def key_value_dir_get(self, prefix):
            return [(key, value) for key, value in stored.items() if key.startswith(prefix)]

    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: index)
    monkeypatch.setattr(ocp.multihost, "get_jax_distributed_client", Client)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with _Signals(minutes=1) as signals:
        due = []
        for step in range(1, 13):
            now[0] += 25
            if signals.is_saving(step):
                due.append(step)
                signals.note_save()
        assert due == ([5, 10] if index == 0 else [])
        signal.raise_signal(signal.SIGUSR1)
        assert [step for step in range(13, 18) if signals.is_saving(step)] == [15]


def test_best_scores_are_those_of_the_metric_the_higher_the_better():
    config = RunConfig(
        model=config_of("ipttcd"),
        data=RecallConfig(num_slots=8, num_keys=4, num_values=4),
        optimizer=OptimizerConfig(),
        steps=8,
        batch_size=2,
        evaluate_every=2,
        keep_best=1,
        best_metric="ppl/on/64",
    )
    records = [{"step": 2, "ppl/on/64": 3.0}, {"step": 3, "loss": 1}, {"step": 4, "ppl/on/64": 2.0}]
    assert best_scores(config, records) == {2: -3.0, 4: -2.0}
    none = {"ppl/on/32": 1.0}, {"ppl/on/64": None}, {"ppl/on/64": float("nan")}, {"ppl/on/64": "1"}
    assert best_scores(config, [{"step": 2} | record for record in none]) == {}
    for change in ({"best_metric": None}, {"best_metric": "recall/x"}, {"evaluate_every": None}):
        with pytest.raises(UserError, match=r"RunConfig\.keep_best 1 with best_metric"):
            config.replace(**change)
