"""The page about the command line: every command that it shows runs, and prints what is shown."""

import doctest
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.runner import dovetail
from tests.cli.test_command_line import COMMANDS
from tests.guides import FENCE, ROOT, examples

GUIDE = ROOT / "docs" / "command-line.md"
# Too long for an example that every test run executes; tests/cli/test_measuring.py runs it.
NOT_RUN = {"demo"}


def sessions() -> list[tuple[str, str]]:
    """Each command of the page's console blocks, and what it prints."""
    blocks = [block[2] for block in FENCE.finditer(GUIDE.read_text()) if block[1] == "console"]
    commands = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(command.partition("\n")[0], command.partition("\n")[2]) for command in commands]


def test_examples_print_what_is_shown(folder: Path) -> None:
    (folder / "models.py").write_text(examples(GUIDE.read_text())[0].code)
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "llama.plan.json", folder / "examples")
    code = 0
    for command, expected in sessions():
        if command == "echo $?":
            assert f"{code}\n" == expected
            continue
        done = dovetail(*command.split()[1:])
        code = done.code
        error = "".join(line for line in done.err.splitlines(keepends=True) if not line.endswith(" ...\n"))
        printed = re.sub(r" +$", "", done.out + error, flags=re.MULTILINE)
        same = doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)
        assert same, f"$ {command}\n{printed}\ninstead of\n{expected}"


def test_every_command_is_shown() -> None:
    shown = {command.split()[1] for command, _ in sessions() if command.startswith("dovetail ")}
    assert {command[0] for command in COMMANDS} - NOT_RUN <= shown


@pytest.mark.parametrize(
    "option", ["--arg", "--config", "--input", "--device", "--train", "--json", "--traceback"]
)
def test_options_of_all_commands_are_explained(option: str) -> None:
    assert f"`{option}" in GUIDE.read_text()
