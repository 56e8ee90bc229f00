"""The batch that a run is compiled for is the one that its data make."""

import jax
import numpy as np
import pytest
from small_models import config_of

from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.sources import BatchesConfig, MixtureConfig, TextConfig
from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.layout import run_mesh
from ttcd_jax.train.optimizer import OptimizerConfig
from ttcd_jax.train.state import abstract_params

SEQ_LEN = 15


def _data(kind, folder):
    if kind == "recall":
        return RecallConfig(num_slots=8, num_keys=4, num_values=4)
    if kind == "batches":
        return BatchesConfig(seq_len=SEQ_LEN)
    (folder / "text.txt").write_text("a document of several rows of text " * 4)
    corpus = CorpusConfig(kind="text", path=str(folder / "text.txt"), validation_percent=0)
    tokenizer = TokenizerConfig(kind="byte")
    text = TextConfig(corpus=corpus, tokenizer=tokenizer, seq_len=SEQ_LEN)
    return text if kind == "text" else MixtureConfig(parts=(text, text), seq_len=SEQ_LEN)


def test_batches_of_the_caller_are_compared_between_processes(monkeypatch):
    compared = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("ttcd_jax.run.build.agree", lambda *call: compared.append(call))

    def told(make):
        compared.clear()
        config = RunConfig(
            model=config_of("swa", vocab_size=9),
            data=BatchesConfig(seq_len=2),
            optimizer=OptimizerConfig(),
            steps=9,
            batch_size=2,
        )
        batches, _ = build.build_data(config, [0], make)
        assert [step for step, _ in batches.iterate(4, 6)] == [*range(4, 10)]
        return {name: digest for _, facts in compared for name, digest in facts.items()}

    first = told(lambda start: (np.full((2, 3), step) for step in range(9)))
    assert [*first] == ["batches 5 to 5", "batches 5 to 6", "batches 5 to 8"]
    later = told(lambda start: (np.full((2, 3), step - (step == 2)) for step in range(9)))
    assert [first[name] == later[name] for name in first] == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "has_ids"),
    [("recall", False), ("batches", False), ("text", True), ("mixture", True)],
)
def test_only_data_that_pack_documents_have_segment_ids(tmp_path, kind, has_ids):
    data = _data(kind, tmp_path)
    model = config_of("ipttcd", vocab_size=max(data.vocab_size, 8))
    config = RunConfig(model=model, data=data, optimizer=OptimizerConfig(), steps=1, batch_size=4)
    mesh = run_mesh(config)
    make = (lambda step: [np.ones((4, SEQ_LEN + 1), int)]) if kind == "batches" else None
    batches, _ = build.build_data(config, range(4), make)
    ((_, batch),) = batches.iterate(0, 1)
    program = build.Program(config, mesh)
    placed, planned = program.placed(batch), program.batch
    assert ("segment_ids" in planned) is has_ids
    facts = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), x) for x in (placed, planned)]
    assert facts[0] == facts[1]


def test_an_abstract_model_knows_no_mesh():
    """Not even the one in use when it was first asked for: a checkpoint may be read elsewhere."""
    model = config_of("ipttcd", vocab_size=9)
    data = RecallConfig(num_slots=8, num_keys=4, num_values=4)
    config = RunConfig(model=model, data=data, optimizer=OptimizerConfig(), steps=1, batch_size=4)
    with jax.set_mesh(run_mesh(config)):
        leaves = jax.tree.leaves(abstract_params(model))
    assert {leaf.sharding for leaf in leaves} == {None}
