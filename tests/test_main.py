"""The command line finds its commands."""

import subprocess
import sys

import pytest

import shardfn.__main__ as command


def test_each_command_gets_what_follows_its_name(monkeypatch):
    for name in command.COMMANDS:
        monkeypatch.setitem(command.COMMANDS, name, lambda argv, name=name: (name, argv))
    assert command.main(["demo", "--steps", "3"]) == ("demo", ["--steps", "3"])
    assert command.main(["doctor"]) == ("doctor", [])


@pytest.mark.parametrize("argv", [[], ["dance"]])
def test_no_command_or_an_unknown_one_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2 and "{demo,doctor,audit,report}" in capsys.readouterr().err


def test_the_module_runs_as_a_program():
    command_line = [sys.executable, "-m", "shardfn", "doctor"]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "shardfn works here." in done.stdout
