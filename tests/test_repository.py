"""What is around the packages: dependencies, workflows, issue forms, image, hooks, changelog."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import yaml
from commands import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_wheel import ARGUMENTS

from ttcd_jax.run.directory import FORMAT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KERNELS = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text())["project"]
EXTRAS = {x["name"]: x["optional-dependencies"] for x in (PROJECT, KERNELS)}


def _yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def _pins(*names: str) -> dict[str, str]:
    lines = [x for name in names for x in (ROOT / name).read_text().splitlines() if "==" in x]
    pins = [line.split("==") for line in lines]
    assert len({name for name, _ in pins}) == len(pins), "pinned twice"
    return {canonicalize_name(name): version for name, version in pins}


def _direct(lines: list[str]) -> list[Requirement]:
    """The requirements, those of our packages' extras in the place of their names."""
    found = []
    for one in map(Requirement, lines):
        if one.name not in EXTRAS:
            found.append(one)
        for extra in one.extras:
            found += _direct(EXTRAS[one.name][extra])
    return found


def test_what_the_files_pin_is_what_the_packages_allow():
    """requirements.txt suffices for the quickstart, all three for the tests."""
    commands = [f"ttcd-jax[{name}]" for name in ("report", "eval", "gguf")]
    needed = [*PROJECT["dependencies"], *KERNELS["dependencies"], *commands]
    names = [f"requirements{name}.txt" for name in ("", "-harness", "-test")]
    every = _pins(*names)
    for pins, lines in ((_pins(names[0]), needed), (every, ["ttcd-jax[test]"])):
        for one in _direct(lines):
            assert one.specifier.contains(pins[canonicalize_name(one.name)]), one
    docs = _pins(names[0], "requirements-docs.txt")
    assert {canonicalize_name(one.name) for one in _direct(["ttcd-jax[docs]"])} <= docs.keys()
    assert [x for x in docs.keys() & every if docs[x] != every[x]] == []
    assert PROJECT["version"] == KERNELS["version"]


def test_both_ends_have_what_they_need():
    """`make ends` has requirements.txt and requirements-test.txt alone, and every example runs."""
    texts = {path.stem: path.read_text() for path in ROOT.glob("examples/*.py")}
    assert {name for name, text in texts.items() if "sys.argv" in text} == ARGUMENTS.keys()
    pins = _pins("requirements.txt", "requirements-test.txt")
    own = {path.stem for path in (ROOT / "tests").glob("*.py")} | {"ttcd_jax", "ttcd_kernels"}
    packages = importlib.metadata.packages_distributions()
    for name in ("ends", "conftest", "commands", "test_wheel", "test_repository"):
        body = ast.parse((ROOT / f"tests/{name}.py").read_text()).body
        modules = {x.names[0].name for x in body if isinstance(x, ast.Import)}
        modules |= {x.module for x in body if isinstance(x, ast.ImportFrom)}
        for top in {x.partition(".")[0] for x in modules} - own - sys.stdlib_module_names:
            assert canonicalize_name(packages[top][0]) in pins, f"{name} imports {top}"


def test_workflows_run_what_the_makefile_has():
    targets = set(re.findall(r"^([a-z.]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in ROOT.glob(".github/workflows/*.yml"):
        steps = [x for job in _yaml(path)["jobs"].values() for x in job["steps"]]
        lines = [step["run"].split() for step in steps if "run" in step]
        assert {tool for tool, *_ in lines} == {"make"}
        assert {target for _, target, *_ in lines} <= targets
        used = [step["uses"] for step in steps if "run" not in step]
        assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", name) for name in used)


def test_forms_image_hooks_and_changelog_fit_the_code():
    for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"):
        labels = {field["id"]: field["attributes"]["label"] for field in _yaml(path)["body"]}
        assert "environment.json" in labels["environment"]
    image = (ROOT / "docker/Dockerfile").read_text()
    extras, folder = re.search(r"(?s)ARG EXTRAS=(\S+).*WORKDIR (\S+)", image).groups()
    assert {*extras.split(",")} <= EXTRAS["ttcd-jax"].keys()
    assert f"workingDir: {folder}\n" in (ROOT / "experiments/cluster/jobset.yaml").read_text()
    for hook in _yaml(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]:
        assert {*hook["additional_dependencies"]} <= {*EXTRAS["ttcd-jax"]["dev"]}
    row = (ROOT / "CHANGELOG.md").read_text().partition("| run directory ")[2]
    assert row.split("|")[1].strip() == str(FORMAT)
