"""lm-evaluation-harness (Gao et al.): a `Scorer` as its model, its tasks with data in local files.

Importing this module imports `lm_eval`. A process whose environment has no HF_HUB_OFFLINE and
HF_DATASETS_OFFLINE has both from then on: a data set that is not here is an error, not a download.
"""

import contextlib
import functools
import itertools
import logging
import math
import os
import random
import string
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("DISABLE_MULTIPROC", "1")  # JAX has threads: no forks for standard errors
os.environ.setdefault("TQDM_DISABLE", "1")

import datasets
import lm_eval.evaluator
import lm_eval.tasks
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator_utils import get_sample_size
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks._yaml_loader import load_yaml

from ttcd_jax.config import LIMIT, closest
from ttcd_jax.errors import DataError, UserError, listed
from ttcd_jax.files import parse_json
from ttcd_jax.inference.generate import Request
from ttcd_jax.inference.sampling import SamplingConfig
from ttcd_jax.inference.text import typed
from ttcd_jax.measure.scorer import Scorer, check_numbers
from ttcd_jax.measure.task import digest

_of_harness = lm_eval.evaluator.evaluate
# The harness' own tasks on the data sets of `_SOURCES`; all others are read when a name is none of
# them, which takes seconds.
_FOLDERS = [Path(lm_eval.tasks.__file__).with_name(x) for x in ("hellaswag", "arc", "mmlu")]
_REMEDY = (
    ": its data are files of --data=FOLDER (docs/benchmarks.md), or in datasets' cache; RULER and "
    "BABILong are measured by evaluate --task=ruler, evaluate --task=babilong --form=harness"
)
# Settings of other libraries that change nothing at these values.
_OFF = [("top_k", 0), ("top_k", -1), ("num_beams", 1), ("num_return_sequences", 1)]
_OFF += [("length_penalty", 1), ("typical_p", 1), ("no_repeat_ngram_size", 0), ("use_cache", True)]
_OFF += [("presence_penalty", 0), ("frequency_penalty", 0), ("early_stopping", False), ("n", 1)]
_SETTINGS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"}
_TEXTS = ("question", "subject", "activity_label", "ctx_a", "ctx_b")


class ScorerLM(TemplateLM):
    """A `Scorer` as a language model of the harness. A text is read as a document, bos first, and
    whole: nothing is truncated, however long it is."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        if scorer.tokenizer is None:
            raise UserError("the harness measures models of text: the run has no tokenizer")
        self._scorer, self._tokenizer = scorer, scorer.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self._tokenizer.bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The ids without special tokens; a lone surrogate is read as a question mark."""
        return self._tokenizer.encode(string.encode(errors="replace")).tolist()

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Raises `UserError` for an answer without a token, which has no likelihood."""
        pairs: list[Any] = [request.args for request in requests]
        for context, answer in pairs:
            if not self.tok_encode(answer):
                raise UserError(
                    f"the answer {answer!r} to {context[-60:]!r} has no token, so no likelihood: "
                    "leave the question out"
                )
        return super().loglikelihood(requests, disable_tqdm=True)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Raises `UserError` for kept answers of another model: the harness looks at the request
        alone."""
        super().set_cache_hook(cache_hook)
        if (kept := cache_hook.dbdict) is not None:
            config = str(self._scorer.model.config)
            own = digest([config, self._scorer.checksum, self._tokenizer.digest])
            if not len(kept):
                kept["model"] = own
            if kept.get("model") != own:
                raise UserError("--use_cache has answers of another model: name another file")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        # A token that spans the end of the prompt leaves none to the answer, which is read apart.
        pairs = [
            (self._row(prompt), np.asarray(answer or self.tok_encode(texts[1]), np.int64))
            for texts, prompt, answer in requests
        ]
        return [(_known(x), is_greedy) for x, is_greedy in self._scorer.loglikelihoods(pairs)]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, each in one piece."""
        rows = [self._row(self.tok_encode(request.args[0])) for request in requests]
        return [_known(-float(x.losses.sum(dtype=np.float64))) for x in self._scorer.losses(rows)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        asked: list[Any] = [request.args for request in requests]
        rows = [
            Request(
                tokens=self.tok_encode(context),
                begins_with_bos=True,
                **_generation(settings, index),
            )
            for index, (context, settings) in enumerate(asked)
        ]
        return self._scorer.generate(rows)

    def _row(self, tokens: list[int]) -> np.ndarray:
        bos = self._tokenizer.bos_id
        return np.asarray(tokens if tokens[:1] == [bos] else [bos, *tokens], np.int64)


def _known(likelihood: float) -> float:
    check_numbers("likelihoods", not math.isnan(likelihood))
    return likelihood


def _generation(settings: Mapping[str, Any], index: int = 0) -> dict[str, Any]:
    """Options of a `Request` by the harness' settings. Raises `UserError` for others than ours."""
    given = {name: x for name, x in settings.items() if x is not None and (name, x) not in _OFF}
    sampling = SamplingConfig(**{name: given[name] for name in given.keys() & _SETTINGS})
    counts = [x for name, x in given.items() if name.startswith("max_")]
    if {type(x) for x in counts} - {int} or type(given.get("do_sample", True)) is not bool:
        raise UserError(f"a task wants to generate with {given}: not numbers, or not True or False")
    more = given.pop("stop", [])
    values: dict[str, Any] = {**normalize_gen_kwargs(given)}
    stop, most, is_drawn = (values.pop(x) for x in ("until", "max_gen_toks", "do_sample"))
    stop = [*stop, *(more if isinstance(more, list) else [more])]
    if surplus := sorted(values.keys() - _SETTINGS):
        raise UserError(f"a task wants to generate with {listed(surplus)}: not supported")
    if not all(isinstance(text, str) for text in stop):
        raise UserError(f"a task wants to generate until {stop}: give texts")
    if is_drawn:
        seed = (sampling.seed + index) % 2**32
        sampling = sampling.replace(temperature=given.get("temperature", 1.0), seed=seed)
    else:  # what shapes a draw has no effect
        sampling = SamplingConfig(repetition_penalty=sampling.repetition_penalty)
    texts = tuple(typed(text) for text in stop if text)
    return {"sampling": sampling, "max_new_tokens": most, "stop": texts}


def evaluate(lm: Any, task_dict: Any, **options: Any) -> Any:
    """`lm_eval.evaluator.evaluate`. For a model of ours, raises `UserError` before prompts are
    written for what the harness finds late, or passes over."""
    if isinstance(getattr(lm, "lm", lm), ScorerLM):
        _check(task_dict["tasks"], options)
    return _of_harness(lm, task_dict, **options)


def _check(tasks: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    limit, samples = options.get("limit"), options.get("samples") or {}
    if limit is not None and not LIMIT.allows(limit):
        raise UserError(f"limit {limit} must be {LIMIT.wording}")
    if options.get("apply_chat_template"):
        raise UserError("a run has no chat template: leave apply_chat_template out")
    if options.get("cache_requests"):
        raise UserError(
            "cache_requests keeps prompts by a task's name, whatever its files hold now"
        )
    for name, task in tasks.items():
        if task.OUTPUT_TYPE == "generate_until":
            Request(tokens=[], **_generation(task.get_config("generation_kwargs") or {}))
        if (shots := task.get_config("num_fewshot") or 0) < 0:
            raise UserError(f"{name}: num_fewshot {shots} must be at least 0")
    if not isinstance(samples, dict):
        raise UserError(f"samples {samples!r} are not numbers of questions by task")
    for name, chosen in samples.items():
        if name not in tasks:
            raise UserError(f"samples: no task {name!r} is measured{closest(name, [*tasks])}")
        known = range(len(tasks[name].eval_docs))
        if not chosen or chosen != [number for number in known if number in chosen]:
            text = f"increasing numbers of its {len(known)} questions, from 0"
            raise UserError(f"samples of {name} must be {text}: {chosen}")


class Refusals(contextlib.AbstractContextManager[None]):
    """Inside, what the harness, a task or a template raises is a `UserError`; a defect of ours in
    what they call stays one."""

    def __init__(self, text: str, remedy: str = "") -> None:
        self._text, self._remedy = text, remedy

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return
        modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace))
        places = [name[:7] for name in modules if name.startswith(("lm_eval.", "ttcd_jax."))]
        if "lm_eval" not in places or places[-1] == "lm_eval":
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise UserError(f"the harness {self._text} ({cause}){self._remedy}") from error


class Items(list[tuple[str, str]]):
    """The (task, question) of what is asked, at most `limit` of a task; `loaded` as
    `TaskManager.load` returns it."""

    def __init__(self, loaded: Any, limit: float | None) -> None:
        for name, task in loaded["tasks"].items():
            asked = itertools.islice(task.eval_docs, get_sample_size(task, limit))
            self += [(name, str(question)) for question in asked]
        self.loaded, self.limit = loaded, limit


def load_tasks(
    names: Sequence[str],
    *,
    data: str | None = None,
    include_path: str | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
) -> Items:
    """Tasks and groups of the harness by name, with their own prompts. A task takes its rows from
    the files of the folder `data` where it has them; those of a group that have none there are left
    out, with a warning. `include_path`: a folder of YAML files of more tasks. `limit` and
    `num_fewshot` are those of `lm_eval`. Raises `UserError` for an unknown name and a task that
    cannot be built, `DataError` for a file.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include_path={include_path} is no folder")
    if data is not None and not Path(data).is_dir():
        raise DataError(f"--data={data} is no folder")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is chosen here
    datasets.disable_progress_bars()
    more: list[str | Path] = [] if include_path is None else [include_path]
    known = lm_eval.tasks.TaskManager(include_path=[*_FOLDERS, *more], include_defaults=False)
    if not known.task_index.keys() >= {*names}:
        known = lm_eval.tasks.TaskManager(include_path=more)
    index = known.task_index
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)  # noqa: NPY002  # where tasks draw
    with Refusals(f"cannot build {', '.join(names)}", _REMEDY):
        for name in names:
            if name not in index:
                raise UserError(f"the harness has no task {name!r}{closest(name, [*index])}")
            if data is not None:
                _localize(index, name, Path(data), functools.cache(_splits))
        loaded = known.load([*names])
    for task in loaded["tasks"].values():
        _set_fewshot(task, num_fewshot)
    return Items(loaded, limit)


type _Row = dict[str, Any]


def _localize(index: dict[str, Any], name: str, folder: Path, splits: Any) -> None:
    """Makes a task, or the members of a group or tag, take local rows, of `_splits`; members that
    have none are left out. Raises `UserError` where none is left, `DataError` for a damaged
    file."""
    if (entry := index.get(name)) is None:  # defined inside of its group
        return
    if entry.kind.name not in ("GROUP", "TAG"):
        fields = _local_fields(entry.cfg or {}, folder, splits)
        if fields and entry.yaml_path is not None:
            config = load_yaml(entry.yaml_path, resolve_func=True)
            entry.cfg, entry.yaml_path = config | fields, None
        return
    members, kept, reason = sorted(entry.tags) or entry.cfg["task"], [], None
    for member in members:
        inner = member if isinstance(member, str) else member.get("task", member.get("group"))
        try:
            if isinstance(inner, str):
                _localize(index, inner, folder, splits)
            kept.append(member)
        except DataError:
            raise
        except UserError as error:
            reason = reason or error
    if reason is not None:
        if not kept:
            raise reason
        logging.warning("%s: %d of %d members (%s)", name, len(kept), len(members), reason)
        if entry.kind.name == "TAG":
            entry.tags = set(kept)
        else:
            entry.cfg, entry.yaml_path = entry.cfg | {"task": kept}, None


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """As `lm_eval.simple_evaluate` does. Raises `UserError` where examples would be questions."""
    own = task.get_config("num_fewshot")
    shots = own or 0 if own == 0 or num_fewshot is None else num_fewshot
    task.set_config(key="num_fewshot", value=shots)
    examples = task.fewshot_cfg
    is_apart = task.has_training_docs() or (task.has_validation_docs() and task.has_test_docs())
    if shots and not (is_apart or examples.split or examples.samples):
        raise UserError(
            f"{task.task_name}: {shots} examples would be among the questions, since there are no "
            "others: add a file <name>_train.jsonl, or take --num_fewshot=0"
        )


def measure(items: Items, scorer: Scorer) -> Any:
    """The results of `lm_eval.evaluator.evaluate`."""
    tasks = items.loaded["tasks"]
    for task in tasks.values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    options: Any = {"limit": items.limit, "bootstrap_iters": 1000, "log_samples": False}
    with Refusals(f"cannot measure {', '.join(tasks)}"):
        return evaluate(ScorerLM(scorer), items.loaded, **options)


# By (dataset_path, dataset_name): the files of a data set are `<stem>.jsonl` for the split that is
# scored, `<stem>_<split>.jsonl` for any.
_SOURCES = {
    ("Rowan/hellaswag", None): ("hellaswag", "validation"),
    ("allenai/ai2_arc", "ARC-Easy"): ("arc_easy", "test"),
    ("allenai/ai2_arc", "ARC-Challenge"): ("arc_challenge", "test"),
    ("cais/mmlu", None): ("mmlu", "test"),
}


def _local_fields(config: _Row, folder: Path, splits: Any) -> _Row:
    """Replacements for fields of a task's configuration, none for a data set without a file here.
    Raises `UserError` for a task that has no row to score, `DataError` for a row of another data
    set."""
    path, name = config.get("dataset_path"), config.get("dataset_name")
    source = _SOURCES.get((path, name)) or _SOURCES.get((path, None))
    if source is None or not (local := splits(folder, *source)):
        return {}
    chosen = {x: [row for row in y if row.get("subject", name) == name] for x, y in local.items()}
    found = {split: datasets.Dataset.from_list(rows) for split, rows in chosen.items() if rows}
    if source[1] not in found:
        raise UserError(f"--data={folder} has no row of {config['task']} to score")
    uses = ("training_split", "validation_split", "fewshot_split")
    unused = {use: None for use in uses if config.get(use) not in found}
    return {"custom_dataset": lambda **_: found} | unused


def _splits(folder: Path, stem: str, scored: str) -> dict[str, list[_Row]]:
    """The rows of a data set by split, from the files of `folder`."""
    names = ("train", "validation", "dev", "test")
    paths = {x: folder / f"{stem}_{x}.jsonl" for x in names}
    if (plain := folder / f"{stem}.jsonl").exists():
        paths[scored] = plain
    return {x: [*_rows(path, stem)] for x, path in paths.items() if path.exists()}


def _rows(path: Path, stem: str) -> Iterator[_Row]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(2**24), b""), start=1):
            where = f"{path}, line {number}"
            values = parse_json(line, Path(where))
            try:
                row, choices, answer = _as_on_the_hub(stem, values)
                texts = [*choices, *(row[name] for name in _TEXTS if name in row)]
                if not all(isinstance(x, str) for x in texts) or not all(map(str.strip, choices)):
                    raise ValueError("a text is missing or no string")
                if type(answer) is not int or not 0 <= answer < len(choices):
                    raise ValueError(f"the answer {answer!r} is not one of {len(choices)} choices")
            except (LookupError, TypeError, ValueError) as error:
                raise DataError(f"{where} is no row of {stem}: {error!r}") from error
            yield row


def _as_on_the_hub(stem: str, row: _Row) -> tuple[_Row, list[Any], Any]:
    """(row, choices, answer) of a line. ARC's may have a list of `choices` and the index `gold`."""
    if stem == "hellaswag":
        label, names = int(row["label"]), ("activity_label", "ctx_a", "ctx_b", "endings")
        return {name: row[name] for name in names} | {"label": label}, row["endings"], label
    choices = row["choices"]
    if stem == "mmlu":
        if len(choices) != 4:
            raise ValueError("there are not four choices")
        names = ("subject", "question", "choices", "answer")
        return {name: row[name] for name in names}, choices, row["answer"]
    if isinstance(choices, dict):
        answer = choices["label"].index(row["answerKey"])
    else:
        labels = [*string.ascii_uppercase[: len(choices)]]
        choices, answer = {"text": choices, "label": labels}, row["gold"]
    key = {"question": row["question"], "answerKey": choices["label"][answer]}
    return key | {"choices": choices}, choices["text"], answer
