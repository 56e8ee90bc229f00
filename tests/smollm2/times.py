"""Seconds of the same work by this package and by transformers, each in a process of its own: the
likelihoods of answers, a prompt, the tokens after it, and 512 MiB of matrices times a vector, which
is how fast memory is read.

    python -m tests.smollm2.times REQUESTS ours RUN [compute=bfloat16]
    python tests/smollm2/times.py REQUESTS theirs GGUF [compute=bfloat16]   with torch, transformers

REQUESTS is the file of `asked.py`, or one like it. Every piece of work is done twice: what is
compiled or loaded at the first time is in its seconds alone. Run the two after each other, several
times, with nothing beside them.
"""

import json
import sys
import time
from pathlib import Path

BATCH, PROMPT, NEW = 16, 1024, 64


def ours(place, compute):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ttcd_jax.inference import Generation, Request, inference_model
    from ttcd_jax.measure.scorer import Scorer
    from ttcd_jax.run.directory import load_run

    changes = [] if compute == "float32" else [f"Precision.compute='{compute}'"]
    run = load_run(place, changes=changes)
    model, scorer = inference_model(run.model), Scorer(run.model, batch_size=BATCH)

    def likelihoods(pairs):
        return sum(x.log_likelihood for x in scorer.loglikelihoods(pairs))

    def continued(ids, count):
        request = Request(tokens=np.array(ids), max_new_tokens=count, stop_tokens=())
        return [event.token for event in Generation(model, run.tokenizer, [request])]

    matrices, vector = jnp.ones((128, 1024, 1024)), jnp.ones(1024)
    product = jax.jit(lambda x, y: (x @ y).sum())
    return jax.__version__, likelihoods, continued, lambda: float(product(matrices, vector))


def theirs(place, compute):
    import torch
    import transformers

    file = Path(place)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=getattr(torch, compute)
    ).eval()

    def likelihoods(pairs):
        """As lm-evaluation-harness: the longest first, padded on the right."""
        rows, total = sorted(pairs, key=lambda x: -len(x[0]) - len(x[1])), 0.0
        for first in range(0, len(rows), BATCH):
            chosen = rows[first : first + BATCH]
            length = max(len(x) + len(y) for x, y in chosen) - 1
            tokens = torch.zeros((len(chosen), length), dtype=torch.long)
            for row, (x, y) in enumerate(chosen):
                tokens[row, : len(x) + len(y) - 1] = torch.tensor((x + y)[:-1])
            logits = model(tokens).logits.log_softmax(-1)
            for row, (x, y) in enumerate(chosen):
                part = logits[row, len(x) - 1 : len(x) + len(y) - 1]
                total += float(part.gather(-1, torch.tensor(y)[:, None]).sum())
        return total

    def continued(ids, count):
        tokens = torch.tensor([ids])
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        return found[0, len(ids) :].tolist()

    def no_gradients(function):
        return torch.no_grad()(function)

    matrices, vector = torch.ones((128, 1024, 1024)), torch.ones(1024)
    functions = map(no_gradients, (likelihoods, continued))
    return torch.__version__, *functions, lambda: float((matrices @ vector).sum())


def main():
    requests, whose, place, *options = sys.argv[1:]
    asked = json.loads(Path(requests).read_text())
    compute = dict(x.split("=") for x in options).get("compute", "float32")
    version, likelihoods, continued, read = {"ours": ours, "theirs": theirs}[whose](place, compute)
    pairs = [(x, y) for answers in asked["questions"] for x, y in answers]
    text = (asked["excerpts"][0] * PROMPT)[:PROMPT]
    work = {
        f"{len(pairs)} answers": lambda: likelihoods(pairs),
        f"{PROMPT} tokens and one": lambda: continued(text, 1),
        f"{PROMPT} tokens and {NEW}": lambda: continued(text, NEW),
        "512 MiB times a vector": read,
    }
    for name, do in work.items():
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            found = do()
            seconds.append(round(time.perf_counter() - start, 3))
        shown = found if isinstance(found, float) else found[-3:]
        print(json.dumps({"whose": whose, "version": version, "compute": compute, "work": name,
                          "seconds": seconds, "result": shown}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
