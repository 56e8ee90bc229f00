"""Answers of an unfinished evaluation on disk."""

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ttcd_jax.errors import UserError
from ttcd_jax.files import write_whole

Answer = tuple[np.ndarray, ...]  # to one request: arrays [n]

_SECONDS = 3.0  # between two files
_MAX_WAITING = 2**25  # bytes that are written at once
_MAX_BYTES = 2**30  # of a file that is read
_DIGEST_BYTES = 32


class Journal:
    """The answers to batches of requests, in files `KEY.FIRST` of `folder`: the sha256 of key and
    content, then the content. A key is the digest of everything that an answer depends on, so that
    files of other requests, and damaged ones, are ignored. The first process reads and writes; all
    get what it finds. A file that cannot be written is a warning, once."""

    def __init__(self, folder: Path, identity: Any) -> None:
        """`identity`: what answers depend on apart from model and requests, for JSON."""
        self._folder, self._identity = folder, identity
        self._waiting: dict[str, np.ndarray] = {}
        self._written, self._has_failed = time.monotonic(), False

    def key(self, *parts: Any, content: Iterable[bytes]) -> str:
        """The digest of the identity, of `parts` for JSON, and of `content`."""
        digest = hashlib.sha256(json.dumps([self._identity, *parts], sort_keys=True).encode())
        for piece in content:
            digest.update(len(piece).to_bytes(8) + piece)
        return digest.hexdigest()

    def read(self, key: str) -> dict[int, list[Answer]]:
        """The answers found, by the index of their batch."""
        arrays: dict[str, np.ndarray] = {}
        if jax.process_index() == 0:
            for path in sorted(self._folder.glob(f"{key}.*")):
                arrays |= _content(path, key)
        if jax.process_count() > 1:
            data = np.frombuffer(save(arrays), np.uint8)
            size = int(multihost_utils.broadcast_one_to_all(np.array(data.size)))
            data = multihost_utils.broadcast_one_to_all(np.resize(data, size))
            arrays = load(np.asarray(data).tobytes())
        return _answers(arrays)

    def add(self, key: str, batch: int, answers: list[Answer]) -> None:
        """Notes the answers to a batch; they are on disk after some seconds, or `write`."""
        if jax.process_index():
            return
        for row, answer in enumerate(answers):
            self._waiting |= {f"{batch}/{row}/{index}": x for index, x in enumerate(answer)}
        size = sum(values.nbytes for values in self._waiting.values())
        if time.monotonic() - self._written >= _SECONDS or size > _MAX_WAITING:
            self.write(key)

    def write(self, key: str) -> None:
        """Writes the answers that wait."""
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        content = save(waiting)
        path = self._folder / f"{key}.{next(iter(waiting)).partition('/')[0]}"
        try:
            write_whole(path, hashlib.sha256(key.encode() + content).digest() + content)
        except UserError as error:
            if not self._has_failed:
                logging.warning("an interruption would repeat what is evaluated now: %s", error)
            self._has_failed = True
        self._written = time.monotonic()


def _content(path: Path, key: str) -> dict[str, np.ndarray]:
    """The arrays of a file; none of one that is damaged."""
    try:
        data = path.read_bytes() if path.is_file() and path.stat().st_size <= _MAX_BYTES else b""
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        is_whole = hashlib.sha256(key.encode() + content).digest() == digest
        arrays = load(content) if is_whole else {}
        _answers(arrays)
        return arrays
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError):
        return {}


def _answers(arrays: dict[str, np.ndarray]) -> dict[int, list[Answer]]:
    """Those whose arrays are named BATCH/ROW/INDEX. Raises `ValueError` where one is missing."""
    found: dict[int, list[Answer]] = {}
    for name in sorted(arrays, key=lambda name: [*map(int, name.split("/"))]):
        batch, row, index = map(int, name.split("/"))
        answers = found.setdefault(batch, [])
        if index == 0:
            answers.append(())
        if (row, index) != (len(answers) - 1, len(answers[-1])):
            raise ValueError(f"{name} without those before it")
        answers[-1] = (*answers[-1], arrays[name])
    return found
