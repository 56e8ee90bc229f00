"""The MAD tasks: rows, streams, sizes; parity has the published rows bit by bit."""

from pathlib import Path

import numpy as np
import pytest

from experiments.studies.mad.tasks import BASELINES, TASKS, MADConfig, instances, settings
from tests.parity.golden import Golden
from tests.parity.mad import task_config
from ttcd_jax.measure.task import digest

GOLDEN = Path(__file__).parents[3] / "golden"
NOISE = {"vocab_size": 8, "seq_len": 10, "frac_noise": 0.9, "noise_vocab_size": 2}
# The smallest sizes; of the second task rows of noise alone, without a key to ask for, are drawn
# anew: about one in eight.
FUZZY = {"vocab_size": 16, "seq_len": 13, "k_motif_size": 3, "v_motif_size": 3}
SMALL = {
    TASKS[0]: [{"vocab_size": 2, "seq_len": 4}, {"vocab_size": 7, "seq_len": 12}],
    TASKS[1]: [NOISE],
    TASKS[2]: [FUZZY, {"vocab_size": 3, "seq_len": 5}],
    TASKS[3]: [{"vocab_size": 3, "seq_len": 2}],
    TASKS[4]: [{"vocab_size": 2, "seq_len": 2}],
    TASKS[5]: [{"vocab_size": 3, "seq_len": 4, "num_tokens_to_copy": 1}],
}
# Of rows that obey the rules of the tasks token by token, by the tests until commit 5a926f8.
DIGESTS = ("a07e09cb891c91d7", "03bf08d483989464", "89dbbeb6b71b2396")
DIGESTS += ("631bc980ebec2892", "39a8def4c19c2108", "4ef4226c65304bb4")


@pytest.mark.parametrize(("task", "expected"), [*zip(TASKS, DIGESTS, strict=True)])
def test_rows_of_every_setting_and_of_the_smallest_sizes_are_as_they_were(task, expected):
    found = [instances(x.config, seed=6, num_train=2, num_test=2) for x in settings(task)]
    for sizes in SMALL[task]:
        config = MADConfig(task=task, **sizes)
        found.append(instances(config, seed=5, num_train=50, num_test=50))
    assert {x.dtype for splits in found for rows in splits for x in rows} == {np.dtype(np.int32)}
    assert digest([[tuple(rows) for rows in splits] for splits in found])[:16] == expected
    published = Golden(GOLDEN / f"mad_{task.replace('-', '_')}.npz").info["configs"]
    first = next(source for source in published if source["name"] == "c0")
    assert task_config(first) == BASELINES[task]


def test_there_are_66_settings_as_published_each_the_baseline_or_one_change_of_it():
    numbers = dict(zip(TASKS, (11, 14, 11, 6, 11, 13), strict=True))
    for task in TASKS:
        first, *changed = settings(task)
        assert first == ("default", BASELINES[task], 256 if task == "memorization" else 12_800)
        assert len({setting[1:] for setting in (first, *changed)}) == numbers[task]
        for setting in changed:
            name, value = setting.name.split("=")
            sizes = [x.config.to_dict() | {"num_train": x.num_train} for x in (setting, first)]
            assert sizes[0] == sizes[1] | {name: float(value)}
