"""The text of a run is that it was trained on."""

import json
import shutil

import corpora
import pytest

from ttcd_jax.data.sources import MixtureConfig, TextConfig, text_records
from ttcd_jax.data.tokenizer import TokenizerConfig, build_tokenizer
from ttcd_jax.errors import DataError


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_changed_text_is_refused_with_the_option_that_gives_another(tmp_path, is_mixed):
    folder = tmp_path / "text"
    texts = [f"The text of file {number}.\n" for number in range(40)]
    corpus = corpora.text_folder(folder, texts, validation_files=2)
    data = TextConfig(corpus=corpus, tokenizer=TokenizerConfig(), seq_len=8)
    if is_mixed:
        data = MixtureConfig(parts=(data, data), seq_len=8)
    tokenizer, stored = build_tokenizer(TokenizerConfig()), data.to_dict()
    (tmp_path / "data.json").write_text(json.dumps(data.rows(0)[1]))

    def read(text=None):
        return sum(map(len, text_records(tmp_path, stored, tokenizer, text, "background")))

    assert read() == (4 if is_mixed else 2)
    (folder / "01.txt").write_text("The text of file one.\n")
    with pytest.raises(DataError, match=r"data changed since .* was started") as caught:
        read()
    assert caught.value.__notes__ == ["--background=PATH gives another text"]
    assert read(str(folder)) == 40
    (tmp_path / "data.json").unlink()  # of a run that was not trained on text of its own
    assert read() == (4 if is_mixed else 2)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=f"no file or folder at {folder}: give the path") as caught:
        read()
    assert caught.value.__notes__ == ["--background=PATH gives another text"]
