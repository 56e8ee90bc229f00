import json
from pathlib import Path

from devices import printed

# 60: where a clamp at 0 lost gradient of the learned decay under jit, at the default level; 95: the
# memory of a float32 layer became float64 at documents.
METHODS = ("ipttcd", "ipttcd_ideal", "ipttt", "lact", "deltanet", "gated_deltanet", "swa")
CASES = (*range(54, 64), 95, *METHODS)
BOUND = {"float64": 1e-11, "float32": 1e-4}


def test_random_layers_compiled_as_users_compile_them_equal_their_definition():
    script = Path(__file__).with_name("any_form.py")
    cases = printed(str(script), *map(str, CASES), count=1, XLA_FLAGS="").splitlines()
    assert len(cases) == len(CASES)
    for case in map(json.loads, cases):
        assert case["error"] < BOUND[case["dtype"]], case
