from ttcd_jax.train.hardware import HARDWARE, data_sheet, parse_topology


def test_a_topology_is_a_device_and_their_number():
    assert parse_topology("h100x64") == (HARDWARE["H100"], 64)
    assert parse_topology("A100x4") == (HARDWARE["A100"], 4)


def test_the_name_a_device_gives_itself_finds_its_data_sheet():
    assert data_sheet("NVIDIA H100 80GB HBM3") == HARDWARE["H100"]
    assert data_sheet("NVIDIA GB200") == HARDWARE["B200"]
    assert data_sheet("cpu") is None
