"""A book is read once, and its memory kept; another process answers with it, or with two of them.

    python examples/book_memory.py RUN MEMORY BOOK           reads BOOK, writes MEMORY
    python examples/book_memory.py RUN MEMORY [MEMORY ...]   answers a line from standard input

RUN: a run with a memory in its down projections, as examples/model. MEMORY: a folder.
"""

import sys
import time
from pathlib import Path

from ttcd_jax import load_run
from ttcd_jax.inference import (
    Generation,
    Request,
    inference_model,
    load_memory,
    memories_of,
    prefill,
    start_from,
    start_state,
)
from ttcd_jax.inference.saved_state import save_state


def size(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).iterdir())


def keep(run, folder: str, book: str) -> None:
    """Writes the memory of a book, and for comparison the state after it."""
    model, tokens = inference_model(run.model), run.tokenizer.encode(Path(book).read_bytes())
    begin = time.perf_counter()
    _, state = prefill(model, start_state(model, 1), tokens[None])
    (memory,) = memories_of(model, state)
    print(f"{memory.tokens_read:,} tokens read in {time.perf_counter() - begin:.2f} s")
    memory.save(folder)
    save_state(f"{folder}.state", model, state)
    print(f"memory {size(folder):,} bytes, state {size(f'{folder}.state'):,} bytes")


def answer(run, folders: list[str], question: str) -> str:
    """The text after a question, from the sum of the memories."""
    model, begin = inference_model(run.model), time.perf_counter()
    first, *others = (load_memory(folder, model) for folder in folders)
    memory = sum(others, first)
    print(f"{memory.tokens_read:,} tokens remembered in {time.perf_counter() - begin:.2f} s")
    request = Request(tokens=run.tokenizer.encode(question), max_new_tokens=40)
    state = start_from(model, [memory])
    return "".join(x.text for x in Generation(model, run.tokenizer, [request], state=state))


if __name__ == "__main__":
    run_dir, *paths = sys.argv[1:]
    run = load_run(run_dir)
    if Path(paths[-1]).is_file():
        keep(run, *paths)
    else:
        print(answer(run, paths, sys.stdin.readline()))
