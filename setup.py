"""What pyproject.toml cannot say: packages in other folders, and README.md as a registry shows it,
without pictures of the repository, its files by their address: `Source` in [project.urls] of
pyproject.toml, a repository of GitHub; without one as text."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

_LOCAL = r"(?!https?:)"
source = tomllib.loads(Path("pyproject.toml").read_text())["project"].get("urls", {}).get("Source")
_PARTS = (
    (r"(?s)<picture>.*?</picture>\s*", ""),
    (rf'<img[^>]*src="{_LOCAL}[^>]*>\s*', ""),
    (rf"!\[[^\]]*\]\({_LOCAL}[^)]*\)\s*", ""),
    (rf"\[([^\]]*)\]\({_LOCAL}([^)]*)\)", rf"[\1]({source}/blob/HEAD/\2)" if source else r"\1"),
    (r"<!--.*?-->", ""),
)
readme = Path("README.md").read_text()
for pattern, text in _PARTS:
    readme = re.sub(pattern, text, readme)

FOLDERS = {f"ttcd_jax.{name}": f"experiments/{name}" for name in ("configs", "cluster")}
setup(
    packages=[*find_packages(include=["ttcd_jax*"]), *FOLDERS],
    package_dir=FOLDERS,
    long_description=readme,
    long_description_content_type="text/markdown",
)
