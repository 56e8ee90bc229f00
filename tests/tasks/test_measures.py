import math

import numpy as np
import pytest
from small_models import config_of

from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.measure.scorer import Scores
from ttcd_jax.tasks.perplexity import bucket_edges, by_position
from ttcd_jax.tasks.recall import attention_reach, by_distance


def test_buckets_double_and_end_at_the_length():
    assert bucket_edges(100) == [0, 32, 64, 100]
    assert bucket_edges(64) == [0, 32, 64]
    assert bucket_edges(20) == [0, 20]


def test_perplexity_by_position_counts_marked_targets_and_their_bytes():
    length = 64
    losses = np.full((2, length), math.log(2))
    losses[:, 32:] = math.log(8)
    targets = np.full((2, length), 65)
    targets[0, 0] = ByteTokenizer().eos_id  # a target without bytes
    mask = np.ones((2, length), bool)
    mask[1, 32:] = False
    rows = {"tokens": targets, "targets": targets, "loss_mask": mask}
    first, second, whole = by_position(Scores(losses, losses > 0), rows, ByteTokenizer())
    assert (first.context, first.tokens) == ("0-31", 64)
    assert first.perplexity == pytest.approx(2)
    assert first.bits_per_byte == pytest.approx(64 / 63)
    assert (second.context, second.tokens) == ("32-63", 32)
    assert second.perplexity == pytest.approx(8)
    assert second.bits_per_byte == pytest.approx(3)
    assert (whole.context, whole.tokens) == ("all", 96)
    short = {name: field[:, :20] for name, field in rows.items()}
    (only,) = by_position(Scores(losses[:, :20], losses[:, :20] > 0), short, ByteTokenizer())
    assert (only.context, only.tokens) == ("all", 40)


def test_recall_by_distance_splits_at_the_reach_of_attention():
    distance = np.zeros((1, 200), np.int32)
    distance[0, :6] = [1, 10, 11, 50, 90, 100]
    rows = {"distance": distance, "loss_mask": distance > 0}
    is_hit = np.zeros((1, 200), bool)
    is_hit[0, [0, 1, 3]] = True
    records = by_distance(Scores(np.zeros((1, 200)), is_hit), rows, reach=10)
    assert (records[0].distance, records[0].accuracy, records[0].queries) == ("1-10", 1, 2)
    assert (records[-1].distance, records[-1].accuracy) == ("beyond 10", 0.25)
    assert sum(r.queries for r in records[1:-1]) == records[-1].queries == 4


def test_reach_of_stacked_windows():
    assert attention_reach(config_of("swa", num_layers=3, window=16)) == 45
    assert attention_reach(config_of("full")) is None
