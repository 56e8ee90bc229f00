"""What is around the packages: dependencies, workflows, issue forms, image, hooks, changelog."""

import re
import tomllib

import pytest
import yaml
from commands import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ttcd_jax.run.directory import FORMAT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KERNELS = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text())["project"]
EXTRAS = {x["name"]: x["optional-dependencies"] for x in (PROJECT, KERNELS)}
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()


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
    assert PROJECT["version"] == KERNELS["version"]


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda x: x.stem)
def test_a_workflow_runs_what_the_makefile_has(path):
    targets = set(re.findall(r"^([a-z.]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            if "run" in step:
                tool, target, *_ = step["run"].split()
                assert (tool, target) == ("make", target if target in targets else None)
            else:
                assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])


def test_an_issue_has_the_environment_of_its_run():
    for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} == form.keys()
        labels = {field["id"]: field["attributes"]["label"] for field in form["body"]}
        assert len(labels) == len(form["body"])
        assert "environment.json" in labels["environment"]


def test_the_image_is_that_of_the_cluster():
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert {*extras.split(",")} <= EXTRAS["ttcd-jax"].keys()
    jobset = (ROOT / "experiments/cluster/jobset.yaml").read_text()
    (folder,) = re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)
    assert f"workingDir: {folder}\n" in jobset
    let_in = (ROOT / "docker/Dockerfile.dockerignore").read_text().split()
    copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)[0].split()
    assert [f"!{name.partition('/')[0]}" for name in copied] == let_in[1:]


def test_hooks_need_nothing_installed():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]:
        assert hook["language"] == "python"
        assert {*hook["additional_dependencies"]} <= {*EXTRAS["ttcd-jax"]["dev"]}


def test_the_changelog_has_the_format_of_run_directories():
    (row,) = re.findall(r"^\| run directory .*$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert row.split("|")[2].strip() == str(FORMAT)
