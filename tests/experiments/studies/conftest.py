import importlib

import pytest

from ttcd_jax.methods.registry import METHODS


@pytest.fixture(scope="module")
def study(request):
    """The module that the tests name STUDY, whose methods no other test knows."""
    before = {*METHODS}
    yield importlib.import_module(request.module.STUDY)
    for name in {*METHODS} - before:
        del METHODS[name]
