"""Parts of models compile on fake devices, and what is printed of them is there."""

from scripts import aot_parts


def test_parts_on_fake_devices(capsys):
    assert aot_parts.main(["cpu:2", "attention", "packed", "--tokens", "64"]) == 0
    attention, q8, q4 = capsys.readouterr().out.splitlines()
    # Three arrays [1, 64, 32, 128] in 16 bits, of which each device has half of the heads.
    assert attention.startswith("cpu:2 attention 64: arguments 0.75 MiB, temporaries ")
    assert q8.startswith("cpu:2 packed Q8_0: arguments 68.02 MiB")
    assert q4.startswith("cpu:2 packed Q4_K: arguments 36.02 MiB")
