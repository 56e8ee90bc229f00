"""lm-evaluation-harness (Gao et al.): a `Scorer` as its model, its tasks on local files.

Importing this module imports `lm_eval`. A process whose environment has no HF_HUB_OFFLINE and
HF_DATASETS_OFFLINE has both from then on: a data set that is not here is an error, not a download.
"""

import functools
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("DISABLE_MULTIPROC", "1")  # JAX has threads: no forks for standard errors
os.environ.setdefault("TQDM_DISABLE", "1")

import datasets
import jinja2
import lm_eval.tasks
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks._yaml_loader import load_yaml

from ttcd_jax.config import closest
from ttcd_jax.errors import DataError, UserError, listed
from ttcd_jax.eval.harness_data import LocalData
from ttcd_jax.eval.harness_ruler import Encode, importable
from ttcd_jax.eval.scorer import Scorer
from ttcd_jax.inference.generate import Request
from ttcd_jax.inference.sampling import SamplingConfig

_RESAMPLES = 1000  # for the standard error of what is no mean
# Errors of the Python and the templates of a user's task, without its data or with others.
_IN_TASKS = OSError, ImportError, ValueError, TypeError, LookupError, AttributeError
_IN_TASKS += AssertionError, jinja2.TemplateError
# The harness' own tasks on the data sets that `LocalData` knows; all others are read when a name is
# none of them, which takes seconds.
_OWN = ("hellaswag", "arc", "mmlu", "ruler", "babilong")
_FOLDERS = [Path(lm_eval.tasks.__file__).with_name(x) for x in _OWN]


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
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [
            (self._row(prompt), np.asarray(answer, np.int64)) for _, prompt, answer in requests
        ]
        return [(x.log_likelihood, x.is_greedy) for x in self._scorer.loglikelihoods(pairs)]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, each in one piece."""
        rows = [self._row(self.tok_encode(request.args[0])) for request in requests]
        return [-float(x.losses.astype(np.float64).sum()) for x in self._scorer.losses(rows)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        rows = [self._request(i, *request.args) for i, request in enumerate(requests)]
        return self._scorer.generate(rows)

    def _row(self, tokens: list[int]) -> np.ndarray:
        bos = self._tokenizer.bos_id
        return np.asarray(tokens if tokens[:1] == [bos] else [bos, *tokens], np.int64)

    def _request(self, index: int, context: str, settings: Mapping[str, Any]) -> Request:
        values: dict[str, Any] = {**normalize_gen_kwargs({**settings})}
        stop, most, is_drawn = (values.pop(x) for x in ("until", "max_gen_toks", "do_sample"))
        if surplus := sorted(values.keys() - {"temperature", "top_p", "top_k", "min_p"}):
            raise UserError(f"a task wants to generate with {listed(surplus)}: not supported")
        if not all(isinstance(text, str) for text in stop):
            raise UserError(f"a task wants to generate until {stop}: give texts")
        drawn = {"temperature": 1.0, "seed": index} | values if is_drawn else {}
        options = {"max_new_tokens": most, "stop": tuple(filter(None, stop))}
        tokens = self.tok_encode(context)
        return Request(tokens=tokens, sampling=SamplingConfig(**drawn), **options)


class Items(list[tuple[str, int]]):
    """The (task, index) of what is asked, at most `limit` of a task; `loaded` as
    `TaskManager.load` returns it."""

    def __init__(self, loaded: Any, limit: int | None) -> None:
        tasks = loaded["tasks"].items()
        super().__init__((name, i) for name, x in tasks for i in range(len(x.eval_docs))[:limit])
        self.loaded, self.limit = loaded, limit

    def documents(self) -> dict[str, list[str]]:
        """What is asked, by task."""
        tasks = self.loaded["tasks"].items()
        return {name: [str(x) for x in task.eval_docs][: self.limit] for name, task in tasks}


def load_tasks(
    names: Sequence[str],
    *,
    data: str | None = None,
    include_path: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    encode: Encode | None = None,
) -> Items:
    """Tasks and groups of the harness by name, with their own prompts. A task takes its rows from
    the files of the folder `data` where it has them; those of a group that have none there are left
    out, with a warning. `include_path`: a folder of YAML files of more tasks. `limit`,
    `num_fewshot` and `metadata` are those of `lm_eval`. RULER counts lengths in tokens of `encode`.
    Raises `UserError` for an unknown name and a task that cannot be built, `DataError` for a file.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include_path={include_path} is no folder")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is chosen here
    datasets.disable_progress_bars()
    index = (manager := _manager(names, include_path, dict(metadata or {}))).task_index
    local = LocalData(data, encode, (metadata or {}).get("max_seq_lengths"))
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)  # noqa: NPY002  # where tasks draw
    try:
        for name in names:
            if name not in index:
                raise UserError(f"the harness has no task {name!r}{closest(name, [*index])}")
            _localize(index, name, local)
        loaded = manager.load([*names])
    except UserError:
        raise
    except _IN_TASKS as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(
            f"the harness cannot build {', '.join(names)} ({cause}): its data are files of "
            "--data=FOLDER (docs/evaluation.md), or in the cache of datasets"
        ) from error
    for task in loaded["tasks"].values():
        _set_fewshot(task, num_fewshot)
    return Items(loaded, limit)


def _manager(
    names: Sequence[str], include_path: str | None, metadata: dict[str, Any]
) -> lm_eval.tasks.TaskManager:
    more: list[str | Path] = [] if include_path is None else [include_path]
    manager = functools.partial(lm_eval.tasks.TaskManager, metadata=metadata)
    own = manager(include_path=[*_FOLDERS, *more], include_defaults=False)
    is_own = all(name in own.task_index for name in names)
    return own if is_own else manager(include_path=more)


def _localize(index: dict[str, Any], name: str, data: LocalData) -> None:
    """Makes a task, or the members of a group or tag, take local rows; members that have none are
    left out. Raises `UserError` where none is left, `DataError` for a damaged file."""
    if (entry := index.get(name)) is None:  # defined inside of its group
        return
    if entry.kind.name not in ("GROUP", "TAG"):
        local = data.fields(entry.cfg or {})
        if local and entry.yaml_path is not None:
            with importable():
                config = load_yaml(entry.yaml_path, resolve_func=True)
            entry.cfg, entry.yaml_path = config | local, None
        return
    members, kept, reason = sorted(entry.tags) or entry.cfg["task"], [], None
    for member in members:
        inner = member if isinstance(member, str) else member.get("task", member.get("group"))
        try:
            if isinstance(inner, str):
                _localize(index, inner, data)
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
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    examples = task.fewshot_cfg
    is_apart = task.has_training_docs() or (task.has_validation_docs() and task.has_test_docs())
    if shots and not (is_apart or examples.split or examples.samples):
        raise UserError(
            f"{task.task_name}: {shots} examples would be among the questions, since there are no "
            "others: add a file <name>_train.jsonl, or take --num_fewshot=0"
        )


def measure(items: Items, scorer: Scorer) -> list[dict[str, Any]]:
    """A record for every metric of every task and group, members after their group, `depth` groups
    down. `chance` is the accuracy that guessing reaches, None where there are no choices."""
    loaded = items.loaded
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    options: Any = {"limit": items.limit, "bootstrap_iters": _RESAMPLES, "log_samples": False}
    try:
        results: Any = evaluate(ScorerLM(scorer), loaded, **options)
    except jinja2.TemplateError as error:
        raise DataError(f"a row does not fit the prompt of its task ({error})") from error
    members = results["group_subtasks"]
    inner = {name for names in members.values() for name in names}
    roots = [name for name in (*loaded["tasks"], *members) if name not in inner]
    records = [record for name in roots for record in _records(name, 0, loaded, results)]
    if not records:
        raise UserError(f"the harness measures nothing of {listed(roots)}: check their metrics")
    return records


def _records(name: str, depth: int, loaded: Any, results: Any) -> Iterator[dict[str, Any]]:
    """Those of a task, or of a group and its members."""
    values, group = results["results"][name], loaded["groups"].get(name)
    tasks = [loaded["tasks"][name]] if group is None else group.get_all_tasks()
    # The reciprocal number of choices of every item.
    chances = [
        1 / count
        for task in tasks
        if task.OUTPUT_TYPE == "multiple_choice"
        for count in Counter(instance.doc_id for instance in task.instances).values()
    ]
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        # The harness' RULER has -1 where there is no item of a length.
        is_absent = _number(value) is None or (metric.isdigit() and value == -1)
        if comma and not metric.endswith("_stderr") and not is_absent:
            is_choice = chances and metric in ("acc", "acc_norm")
            yield {
                "task": name,
                "metric": metric if kind == "none" else f"{metric} ({kind})",
                "value": _number(value),
                "stderr": _number(values.get(f"{metric}_stderr,{kind}")),
                "chance": sum(chances) / len(chances) if is_choice else None,
                "items": sum(results["n-samples"][task.task_name]["effective"] for task in tasks),
                "examples": max(task.get_config("num_fewshot") for task in tasks),
                "depth": depth,
            }
    for member in () if group is None else group.child_names:
        yield from _records(member, depth + 1, loaded, results)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None
