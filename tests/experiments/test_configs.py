import re
from pathlib import Path

import pytest

from experiments import build, plan
from experiments.gin_loading import load_config
from experiments.run_config import RunConfig
from ttcd_jax.train.run_directory import RunDirectory

CONFIG_DIR = Path(__file__).parents[2] / "experiments" / "configs"
RUNS = sorted(
    str(path.relative_to(CONFIG_DIR))
    for path in CONFIG_DIR.rglob("*.gin")
    if "experiments.launch" in path.read_text()
)


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """A run directory for configurations that start from one: text.gin's, not yet trained."""
    directory = RunDirectory(tmp_path_factory.mktemp("other"))
    config = load_config(RunConfig, "text.gin", [], config_dir=CONFIG_DIR)
    directory.claim(config.to_dict(), "", {})
    return directory.path


@pytest.mark.parametrize("name", RUNS)
def test_every_config_builds_and_has_the_parameters_its_header_states(name, other_run, tmp_path):
    params = [f"START='{other_run}'"] if "start_from" in (CONFIG_DIR / name).read_text() else []
    inherit = build.inherited_model(RunDirectory(tmp_path))
    config = load_config(RunConfig, name, params, config_dir=CONFIG_DIR, inherit=inherit)
    build.check(config)
    build.check_start(config)
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
