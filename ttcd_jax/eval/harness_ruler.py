"""RULER of lm-evaluation-harness, offline: its generators, the run's tokenizer, files of texts.

The modules of RULER and BABILong in lm-eval 0.4.13 import transformers, for a tokenizer, and RULER
downloads texts. Neither is needed here.
"""

import contextlib
import functools
import importlib.util
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import numpy as np

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.eval.ruler.documents import read_essay
from ttcd_jax.files import read_json

_ESSAYS, _SQUAD, _HOTPOT = "essays.jsonl", "dev-v2.0.json", "hotpot_dev_distractor_v1.json"
_ON_ESSAYS = ("single_2", "single_3", "multikey_1", "multivalue", "multiquery")
_FILES = {f"niah_{name}": _ESSAYS for name in _ON_ESSAYS}
_FILES |= {"get_squad": _SQUAD, "get_hotpotqa": _HOTPOT}
_MODULES = "lm_eval.tasks.ruler"
_EXAMPLE = 500  # most tokens of the solved example of ruler_vt

Encode = Callable[[str], list[int]]


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Inside, the harness' modules of RULER and BABILong are imported without transformers, and
    without the download of a sentence splitter."""
    import nltk

    stub, name = SimpleNamespace(AutoTokenizer=None), "transformers"
    stubs = {} if importlib.util.find_spec(name) else {name: stub}
    no_download = _changed(nltk.__dict__, {"download": lambda *_: True})
    with _changed(sys.modules, stubs), no_download, contextlib.redirect_stdout(None):
        yield


@contextlib.contextmanager
def _changed(values: dict[str, Any], new: dict[str, Any]) -> Iterator[None]:
    """Inside, `values` has those of `new` too."""
    old = {name: values[name] for name in new if name in values}
    values |= new
    try:
        yield
    finally:
        for name in new:
            del values[name]
        values |= old


def generate(
    task: str, name: str, encode: Encode, lengths: Any, folder: Path | None
) -> datasets.Dataset:
    """The 500 samples of each of `lengths`, in tokens of `encode`, of `task`, whose function in the
    harness is `name`, as `qa_utils.get_squad`. Raises `UserError` for lengths that are
    none, or too short, and where `folder` has not the task's file, `DataError` for its content."""
    if not isinstance(lengths, list) or not all(type(x) is int and x > 0 for x in lengths):
        raise UserError(f"max_seq_lengths of RULER are numbers of tokens, [4096], not {lengths}")
    module, _, function = name.rpartition(".")

    def tokenizer(text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=encode(text))

    changes: dict[str, Any] = {"get_tokenizer": lambda _: tokenizer}
    if file := _FILES.get(function):
        path = Path("FOLDER" if folder is None else folder) / file
        if not path.is_file():
            raise UserError(f"{task} reads {path}: pass --data=FOLDER with {file}")
        if file == _ESSAYS:
            words = re.sub(r"\s+", " ", read_essay(str(path))).split(" ")
            changes["get_haystack"] = lambda **_: words
        else:
            value = read_json(path, dict if file == _SQUAD else list)
            changes["download_json"] = lambda _: value
    with importable():
        source = importlib.import_module(f"{_MODULES}.{module}")
        for length in lengths:
            _check_room(task, source, encode, length)
        source = importlib.reload(source)  # for its own random generator and its caches
        niah = importlib.import_module(f"{_MODULES}.prepare_niah")
    sentences = _changed(niah.__dict__, {"cached_sent_tokenize": _sentences})
    try:
        with _changed(source.__dict__, changes), sentences, contextlib.redirect_stdout(None):
            return getattr(source, function)(max_seq_lengths=lengths)["test"]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"the harness cannot make {task} ({type(error).__name__}: {error})"
        if file in (_SQUAD, _HOTPOT):
            raise DataError(f"{problem}: give the whole {file}, for 500 questions") from error
        raise UserError(problem) from error


@functools.lru_cache(maxsize=4)
def _sentences(text: str) -> list[str]:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    return PunktSentenceTokenizer().tokenize(text)


def _check_room(task: str, source: ModuleType, encode: Encode, length: int) -> None:
    """Raises `UserError` where the harness' search for a size would never end: its smallest text,
    with the answer, is too long."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  # the harness draws there
    least, kind = 0, source.__name__.rpartition(".")[2]
    if kind == "vt_utils":
        text, answer = source.generate_input_output(5, 1, 4, is_icl=True)
        if (size := len(encode(f"{text} {answer}")) + 30) > _EXAMPLE:
            raise UserError(
                f"{task} takes {size} of the run's tokens for a solved example, and the harness "
                f"allows {_EXAMPLE}: it needs a tokenizer of words; take --task=ruler"
            )
        text, answer = source.generate_input_output(10, 1, 4)
        least = len(encode(f"{text} {answer}")) + 30 + _EXAMPLE
    elif kind == "cwe_utils":
        example, text, answer = source.generate_input_output(10, length)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(answer, start=1))
        least = len(encode(f"{example}\n{text} {numbered}")) + 120
    elif kind == "fwe_utils":
        least = max(len(encode(source.TEMPLATE)) + 50, 200)  # 200: four words
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    if least > length:
        raise UserError(
            f"{task} takes {least} of the run's tokens at its smallest and has {length}: pass "
            "larger max_seq_lengths in --metadata, or leave it out"
        )
