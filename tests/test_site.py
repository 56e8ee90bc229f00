"""The site of `make docs`, built once: no warning, no dead link, every field and command."""

import dataclasses
import html
import inspect
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import ttcd_kernels
from commands import ROOT, cpu_environment

import ttcd_jax
from ttcd_jax.commands.completion import _flags
from ttcd_jax.commands.main import COMMANDS
from ttcd_jax.config import Config
from ttcd_jax.run.bindings import reachable_classes
from ttcd_jax.run.config import RunConfig

pytestmark = pytest.mark.skipif(find_spec("sphinx") is None, reason="make .venv/docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The text of the pages in docs/ by name, without tags."""
    folder = tmp_path_factory.mktemp("site")
    [line] = re.findall(r"^docs:.*\n\t\$\(PYTHON\) (.*)", (ROOT / "Makefile").read_text(), re.M)
    words = [*line.replace("build/site", str(folder)).split(), "-Dnb_execution_mode=off"]
    options = {"cwd": ROOT, "env": cpu_environment(), "capture_output": True, "text": True}
    built = subprocess.run([sys.executable, *words], **options)
    assert (built.returncode, built.stderr) == (0, "")
    return {x.stem: x.read_text() for x in folder.glob("docs/*.html")}


def _object(page, name):
    """The documentation of an object, without tags."""
    _, found, rest = page.partition(f'id="{name}"')
    assert found, name
    text = re.split(r'<dt class="sig[^>]*id="(?!' + re.escape(name) + ")", rest)[0]
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def test_every_field_and_every_command_are_on_the_site(site):
    for name, cls in reachable_classes(RunConfig).items():
        if cls.__module__.startswith("ttcd_jax."):  # not those of other tests
            words = _object(site["fields"], f"{cls.__module__}.{name}").split()
            assert {x.name for x in dataclasses.fields(cls)} <= {*words}, name
    for name, (_, before, _) in COMMANDS.items():
        assert f'id="ttcd-{name.replace("_", "-")}"' in site["commands"]
        own = {*_flags(name)} - {"--help", "--import="}
        for flag in own if not before and name != "lm_eval" else ():  # whose are the harness'
            assert f">{flag.strip('=')}<" in site["commands"], (name, flag)


def test_the_public_names_have_signatures_that_a_reader_understands(site):
    text = site["api"]
    names = [f"ttcd_kernels.{x}" for x in ttcd_kernels.__all__]
    for name in dir(ttcd_jax):
        value = getattr(ttcd_jax, name)
        if callable(value) and not (inspect.isclass(value) and issubclass(value, Config)):
            names.append(f"ttcd_jax.{name}")
    for name in names:
        _object(text, name)
    plain = html.unescape(re.sub(r"<[^>]*>", "", text))
    assert "Float[Array, 'B T D']" in plain
    for noise in ("Annotated", "AtLeast", "*args", "NoneType", "jaxtyping."):
        assert noise not in plain
