"""Logits of transformers for small models of every family, with parameters that numpy draws, and
for our models as `own.py` exports them.

    python make.py DIR        in an environment with torch and transformers: writes logits.npz

DIR: the folders that own.py wrote. Transformers 5.24.0 and torch 2.13.0 wrote the file that is
here.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _rope(kind, base, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **settings}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"original_max_position_embeddings": 16}
OWN_YARN = YARN | {"attention_factor": 1.1, "beta_fast": 16.0, "beta_slow": 2.0}
CASES = {
    "llama": {"rms_norm_eps": 1e-5} | _rope("default", 1e5),
    "llama_tied_linear": {"tie_word_embeddings": True} | _rope("linear", 1e4, factor=4.0),
    "llama_llama3": {"head_dim": 16} | _rope("llama3", 5e5, factor=8.0, **LLAMA3),
    "qwen2": {"tie_word_embeddings": True} | _rope("default", 1e6),
    "qwen3": {"head_dim": 8} | _rope("default", 1e6),
    "qwen3_yarn": {"head_dim": 16} | _rope("yarn", 1e4, factor=4.0, **YARN),
    "llama_yarn": {"num_key_value_heads": 6} | _rope("yarn", 1e5, factor=8.0, **OWN_YARN),
}

FILE = Path(__file__).with_name("logits.npz")
TOKENS = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (2, 40))


def drawn(shapes):
    """Parameters by name: norms around one, all else around zero."""
    rng, params = np.random.default_rng(0), {}
    for name in sorted(shapes):
        x = 0.3 * rng.standard_normal(shapes[name]).astype(np.float32)
        params[name] = x + np.float32(name.endswith("norm.weight"))
    return params


def main():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    out, torch_tokens = {}, torch.tensor(TOKENS)
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        with torch.no_grad():
            out[f"{folder.name}.logits"] = model(torch_tokens).logits.numpy()
        print(folder.name, type(model).__name__)
        for code in folder.glob("*.py"):
            out["code"] = hashlib.sha256(code.read_bytes()).hexdigest()
    for case, changes in CASES.items():
        config = AutoConfig.for_model(case.partition("_")[0], **(SIZES | changes))
        model = AutoModelForCausalLM.from_config(config).eval()
        own = {name: list(x.shape) for name, x in model.named_parameters()}
        params = {name: torch.tensor(x) for name, x in drawn(own).items()}
        print(case, model.load_state_dict(params, strict=False), sum(map(np.prod, own.values())))
        with torch.no_grad():
            logits = model(torch_tokens).logits.numpy()
        out |= {f"{case}.config": config.to_json_string(), f"{case}.shapes": json.dumps(own)}
        out[f"{case}.logits"] = logits
    np.savez_compressed(FILE, **out)


if __name__ == "__main__":
    main()
