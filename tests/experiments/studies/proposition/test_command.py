"""The command that draws Proposition 1: its files, its verdict, one line for a mistake."""

import json

import commands
import pytest

TINY = ("--num_draws=6", "--chunk_sizes=4", "--num_fillers=8")


def test_the_command_writes_picture_and_numbers(tmp_path):
    folder = tmp_path / "new" / "folder"
    result = commands.run("proposition", *TINY, f"--out_dir={folder}")
    assert (result.returncode, result.stderr) == (0, "")
    assert "the bound held in every orthogonal case" in result.stdout
    assert "rate = eta / chunk_size" in result.stdout
    assert (folder / "proposition.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((folder / "proposition.json").read_text())
    assert report["bound_held"] is True
    (row,) = report["equality"]
    assert (row["chunk_size"], row["rate"], row["draws"]) == (4, 0.3 / 4, 6)
    drawn = report["orthogonal"]["4"]
    assert drawn["left"] == pytest.approx(drawn["right"], rel=1e-10)
    calm, *disturbed = report["interference"]
    assert (calm["overlap"], calm["below_bound"]) == (0, 0)
    assert max(row["below_bound"] for row in disturbed) > 0


def test_a_bound_that_fails_is_exit_status_1(tmp_path):
    """Asked for twice the right side, no equality will do."""
    program = tmp_path / "program.py"
    program.write_text(
        "from experiments import cli\n"
        "from experiments.studies.proposition import __main__ as command, construction\n"
        "construction.TOLERANCE = -1.0\n"
        "try:\n    cli.run(command.main)\n"
        "except SystemExit as end:\n    print('status', end.code)\n"
    )
    output = commands.output(program, *TINY, f"--out_dir={tmp_path}")
    assert "the bound FAILED in an orthogonal case" in output
    assert output.endswith("status 1\n")
    assert json.loads((tmp_path / "proposition.json").read_text())["bound_held"] is False


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--eta=0", "PropositionConfig.eta 0.0 must be positive and finite"),
        ("--chunk_sizes=4,x", "--chunk_sizes: 'x' is not a number of tokens"),
        ("--chunk_sizes=64", "q1 at 7 and q2 at 16 share a chunk of 64 tokens"),
    ],
)
def test_a_users_mistake_is_one_line(argument, message, tmp_path):
    error = commands.refused("proposition", *TINY, f"--out_dir={tmp_path}", argument)
    assert error.startswith(f"error: {message}")
