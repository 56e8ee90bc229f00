import dataclasses

import pytest

from experiments.mad.tasks.config import BASELINES
from experiments.mad.tasks.settings import TASKS, settings


def test_there_are_66_settings_as_published():
    counts = {task: len(settings(task)) for task in TASKS}
    assert counts == {
        "in-context-recall": 11,
        "noisy-in-context-recall": 14,
        "fuzzy-in-context-recall": 11,
        "memorization": 6,
        "compression": 11,
        "selective-copying": 13,
    }
    assert sum(counts.values()) == 66


@pytest.mark.parametrize("task", TASKS)
def test_a_setting_changes_one_thing_of_the_baseline_and_is_named_by_it(task):
    first, *changed = settings(task)
    assert first.config == BASELINES[task]
    assert first.num_train == (256 if task == "memorization" else 12_800)
    assert len({setting.name for setting in settings(task)}) == len(settings(task))
    for setting in changed:
        name, value = setting.name.split("=")
        differing = {
            field.name
            for field in dataclasses.fields(setting.config)
            if getattr(setting.config, field.name) != getattr(first.config, field.name)
        }
        differing |= {"num_train"} if setting.num_train != first.num_train else set()
        assert differing == {name}
        size = setting.num_train if name == "num_train" else getattr(setting.config, name)
        assert size == float(value)
