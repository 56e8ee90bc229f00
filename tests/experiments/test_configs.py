import re
from pathlib import Path

import pytest

from experiments import build, plan
from experiments.gin_loading import load_config
from experiments.run_config import RunConfig

CONFIG_DIR = Path(__file__).parents[2] / "experiments" / "configs"
RUNS = sorted(path.name for path in CONFIG_DIR.glob("*.gin"))


@pytest.mark.parametrize("name", RUNS)
def test_every_config_builds_and_has_the_parameters_its_header_states(name):
    config = load_config(RunConfig, name, [], config_dir=CONFIG_DIR)
    build.check(config)
    assert RunConfig.from_dict(config.to_dict()) == config
    header = (CONFIG_DIR / name).read_text()
    assert f"--gin={name}" in header
    stated = re.search(r"parameters: ([\d.]+)([KM])", header)
    assert stated, "the header states the number of parameters"
    count = float(stated[1]) * {"K": 1e3, "M": 1e6}[stated[2]]
    assert abs(plan.num_params(config) / count - 1) < 0.01


FILES = sorted(str(path.relative_to(CONFIG_DIR)) for path in CONFIG_DIR.rglob("*.gin"))


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_short_and_starts_with_a_header(name):
    lines = (CONFIG_DIR / name).read_text().splitlines()
    assert lines[0].startswith("# ")
    bindings = [line for line in lines if line and not line.startswith(("#", "include"))]
    keys = [line.split("=")[0].strip() for line in bindings]
    assert len(keys) == len(set(keys))
    assert len(bindings) <= 18
