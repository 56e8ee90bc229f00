"""SHA-256 digests of the files of a checkpoint step, which detect damage.

Orbax verifies no data: a flipped bit in an array file is restored silently.
"""

import json
from pathlib import Path

from ttcd_jax.errors import DataError
from ttcd_jax.files import difference, read_json, sha256, write_whole

DIGEST = "DIGEST.json"


def _files(step_dir: Path) -> dict[str, Path]:
    """Every file below `step_dir`, digests excepted, by its relative name."""
    return {
        file.relative_to(step_dir).as_posix(): file
        for file in sorted(step_dir.rglob("*"))
        if file.is_file() and DIGEST not in file.name
    }


def seal(step_dir: Path) -> None:
    """Writes `DIGEST.json`: {relative file: [size, sha256]}."""
    entries = {name: [x.stat().st_size, sha256(x)] for name, x in _files(step_dir).items()}
    write_whole(step_dir / DIGEST, json.dumps(entries, separators=(",", ":")))


def is_sealed(step_dir: Path) -> bool:
    return (step_dir / DIGEST).is_file()


def verify(step_dir: Path) -> list[str]:
    """The differences from the digest, each as "file: reason"; empty when the step is intact."""
    if not is_sealed(step_dir):
        return [f"{DIGEST}: missing"]
    try:
        entries, found = read_json(step_dir / DIGEST), _files(step_dir)
    except (DataError, OSError) as error:
        return [f"{DIGEST}: {error}"]
    for entry in entries.values():
        if not isinstance(entry, list) or [type(x) for x in entry] != [int, str]:
            return [f"{DIGEST}: not a table of sizes and hashes"]
    # Only names of files in the step are opened.
    problems = [f"{name}: added" for name in found if name not in entries]
    for name, entry in entries.items():
        reason = difference(found[name], *entry) if name in found else "missing"
        problems += [f"{name}: {reason}"] if reason else []
    return problems
