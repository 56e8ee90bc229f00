import pytest

from ttcd_jax.errors import UserError
from ttcd_jax.train.hardware import HARDWARE, data_sheet, parse_topology


def test_a_topology_is_a_device_and_their_number():
    assert parse_topology("h100x64") == (HARDWARE["H100"], 64)
    assert parse_topology("A100x4") == (HARDWARE["A100"], 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10x8", "did you mean 'h100'.*known: a100, h100, h200, b200"),
        ("h100", "as in 'h100x64'"),
        ("h100x0", "as in 'h100x64'"),
        ("64xh100", "as in 'h100x64'"),
        ("h100x1000000", "1000000 devices, plans go up to 4096"),
        ("h100x" + "9" * 5000, "as in 'h100x64'"),
        ("h100x12", "12 devices do not fill nodes of 8"),
    ],
)
def test_a_topology_that_is_none_is_told_what_one_is(text, message):
    with pytest.raises(UserError, match=message):
        parse_topology(text)


def test_the_name_a_device_gives_itself_finds_its_data_sheet():
    assert data_sheet("NVIDIA H100 80GB HBM3") == HARDWARE["H100"]
    assert data_sheet("NVIDIA GB200") == HARDWARE["B200"]
    assert data_sheet("cpu") is None
