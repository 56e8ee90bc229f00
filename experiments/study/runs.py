"""The runs of a study: their training, in a process each, and their evaluations."""

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any

import numpy as np
from absl import logging

from experiments import cli
from ttcd_jax.config import DISTINCT, Config, NonNegative, Positive
from ttcd_jax.data.corpus import load_documents
from ttcd_jax.data.sources import MixtureConfig, TextConfig
from ttcd_jax.errors import UserError
from ttcd_jax.files import read_json, write_json, write_whole
from ttcd_jax.measure.results import FILE, evaluate, folder_name
from ttcd_jax.measure.task import Subject, Task, digest
from ttcd_jax.registry import IMPORTED_MODULES
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig, accepted_changes
from ttcd_jax.run.directory import RunDirectory, load_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig(Config):
    """`recipes`: .gin files of runs that differ in their method alone, the first of which is the
    base of all differences; each is trained with all `seeds`, those of `once` with the first.

    All are evaluated by `evaluations` on the held-out text of every corpus they are trained on, cut
    into pieces of `piece_bytes`, at most `max_pieces` of them, taken evenly.
    """

    recipes: Annotated[tuple[str, ...], DISTINCT]
    once: tuple[str, ...] = ()
    seeds: Annotated[tuple[NonNegative, ...], DISTINCT] = (0, 1, 2)
    evaluations: tuple[Task, ...] = ()
    piece_bytes: Positive = 4096
    max_pieces: Positive = 16

    def validate(self) -> None:
        names = [PurePath(file).stem for file in (*self.recipes, *self.once)]
        if len(set(names)) < len(names):
            raise UserError(f"two recipes of the study have one name: {', '.join(names)}")

    def files(self) -> dict[str, str]:
        """The .gin file of every recipe, by name."""
        return {PurePath(file).stem: file for file in (*self.recipes, *self.once)}

    def chosen(self, only: Sequence[str] = ()) -> list[tuple[str, int]]:
        """(recipe, seed) of all runs, or of the recipes `only`; all first seeds come first."""
        names = self.files()
        for name in only:
            if name not in names:
                raise UserError(f"--only={name} is none of the study's {', '.join(names)}")
        single = {PurePath(file).stem for file in self.once}
        return [
            (name, seed)
            for seed in self.seeds
            for name in names
            if (not only or name in only) and (name not in single or seed == self.seeds[0])
        ]


def run_dir(path: Path, name: str, seed: int) -> Path:
    return path / f"{name}-{seed}"


def results_file(folder: Path, task: Task, name: str, text: str) -> Path:
    """The results of a task on a text in a run directory."""
    return folder / "eval" / folder_name(task.name, f"{name}, {text}") / FILE


def held_out_texts(config: StudyConfig, params: Sequence[str], path: Path) -> dict[str, Path]:
    """Writes the pieces of the held-out text of every corpus into a folder of their own, whose name
    has their digest, so that results on other pieces are made again; the folders by name.

    Raises `UserError` for recipes on other data, or none, for two corpora of one name, and for
    held-out text that is too short.
    """
    data = None
    for file in config.files().values():
        run = load_config(RunConfig, file, params, config_dir=cli.CONFIG_DIR)
        if data is not None and run.data != data:
            raise UserError(f"the recipes of a study have one data configuration, {file} another")
        data = run.data
    parts = data.parts if isinstance(data, MixtureConfig) else (data,)
    texts = {}
    for part in parts:
        if not isinstance(part, TextConfig):
            raise UserError(f"a study is evaluated on text, not on {type(part).__name__}")
        name = "stdlib" if part.corpus.path is None else Path(part.corpus.path).name
        size, pieces = config.piece_bytes, []
        for document in load_documents(part.corpus, "validation"):
            starts = range(0, len(document.text) - size + 1, size)
            pieces += [document.text[start : start + size] for start in starts]
        if not pieces:
            raise UserError(
                f"no held-out document of {name} has {size} bytes: lower StudyConfig.piece_bytes"
            )
        if name in texts:
            raise UserError(f"two corpora of the study are named {name}: rename one of the folders")
        count = min(config.max_pieces, len(pieces))
        chosen = np.linspace(0, len(pieces) - 1, count).astype(int)
        # A cut may be inside a character.
        shown = [pieces[index].decode(errors="ignore") for index in chosen]
        write_json(path / "study.json", config.to_dict())  # so that these are no run's documents
        texts[name] = path / "texts" / f"{name}-{digest(shown)[:12]}"
        for number, text in enumerate(shown):
            write_whole(texts[name] / f"{number:03}.txt", text)
    return texts


def compute(
    config: StudyConfig,
    name: str,
    seed: int,
    params: Sequence[str],
    texts: dict[str, Path],
    path: Path,
) -> None:
    """Trains and evaluates what is missing of a run. Raises `UserError` where training failed, and
    for a run of another configuration."""
    folder, file = run_dir(path, name, seed), config.files()[name]
    params = (*params, f"RunConfig.seed={seed}")
    if (directory := RunDirectory(folder)).is_claimed:
        wanted = load_config(RunConfig, file, params, config_dir=cli.CONFIG_DIR)
        accepted_changes(folder, directory.read_config(), wanted.to_dict(), None)
    missing = [
        (task, text)
        for task, text in itertools.product(config.evaluations, texts)
        if not _is_done(task, results_file(folder, task, name, text), texts[text])
    ]
    if config.evaluations and not missing:
        return
    logging.info("study: %s, seed %d", name, seed)
    command = [sys.executable, "-m", "experiments.launch", f"--gin={file}"]
    command += [f"--param={text}" for text in params]
    command += [f"--import={name}" for name in IMPORTED_MODULES]
    status = subprocess.run([*command, f"--run_dir={folder}"], check=False).returncode
    if status:
        raise UserError(f"{folder.name} stopped with status {status}: {' '.join(command)}")
    run, data = load_run(folder), directory.read_part("data")
    for task, text in missing:
        subject = Subject(run.model, run.tokenizer, data, folder, f"{name}, {text}")
        evaluate(_on(task, texts[text]), subject, run.step).write()


def _on(task: Task, text: Path) -> Task:
    return task.replace(text=str(text))


def _is_done(task: Task, file: Path, text: Path) -> bool:
    """Whether these results are of the same options."""
    options: Any = read_json(file).get("options") if file.exists() else None
    return options == _on(task, text).to_dict()
