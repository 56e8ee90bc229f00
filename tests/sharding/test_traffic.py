"""The bytes between devices that share a row do not grow with the row."""

from pathlib import Path

from devices import run_on_devices

SCRIPT = Path(__file__).with_name("traffic_of_a_step.py")


def test_a_longer_row_sends_no_more():
    short, long = run_on_devices(SCRIPT, "ipttcd")
    assert short["collective-permute"] > 0
    assert long == short


def test_full_attention_alone_sends_all_keys():
    short, long = run_on_devices(SCRIPT, "full")
    assert long["collective-permute"] > 1.9 * short["collective-permute"]
