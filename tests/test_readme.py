"""The README's code runs as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_blocks_run_in_one_process(number, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PYTHON[number])
    subprocess.run([sys.executable, "-W", "error", str(script)], check=True, cwd=tmp_path, timeout=60)


def test_the_first_block_trains_the_same_under_every_launcher(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PYTHON[0].replace("model = ", "torch.manual_seed(0)\nmodel = ", 1))
    commands = re.findall(r"^(python|ragtag(?= launch)|torchrun)( .*?train\.py)", TEXT, flags=re.M)
    assert [name for name, _ in commands] == ["python", "ragtag", "ragtag", "torchrun"]
    outputs = []
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name, rest in commands:
        command = (name + rest).split()
        done = subprocess.run(command, cwd=tmp_path, timeout=100, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        outputs.append([float(line.split()[1]) for line in done.stdout.splitlines()])
    assert len(outputs[0]) == 2
    for losses in outputs[1:]:
        assert losses == pytest.approx(outputs[0], rel=1e-5)


def test_files_and_scripts_that_the_readme_names_exist():
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT) + re.findall(r"scripts/\w+", TEXT):
        assert (ROOT / name).exists(), name
