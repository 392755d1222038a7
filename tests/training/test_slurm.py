"""The README's Slurm script, as far as it runs without Slurm."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import RUN, losses, wait_for

from training.checkpoint import newest

SRUN = """#!/bin/bash
# Both nodes of a job here, a task each; when one ends with an error the other is killed, and its children.
[ "$1" = --kill-on-bad-exit=1 ] && shift || exit 9
for node in 0 1; do SLURM_NODEID=$node "$@" & echo $! >> tasks; done
for task in 1 2; do
  wait -n && continue
  for left in $(jobs -pr); do kill -KILL $left $(cat /proc/$left/task/$left/children); done
  exit 1
done
"""
TORCHRUN = """#!/bin/bash
exec python -m torch.distributed.run --local-addr 127.0.0.$((SLURM_NODEID + 1)) "$@"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds a process's children in /proc")
def test_the_slurm_script_goes_on_where_the_job_before_ended(shards: Path, tmp_path: Path) -> None:
    """The README's own, on two nodes of a CPU each that a pretended `srun` starts here.

    When the time is up, SIGTERM comes to torchrun and, as by some of Slurm's plugins, to its ranks; they
    get it from torchrun again.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", text, re.DOTALL)
    for theirs, ours in (("--nproc-per-node 8", "--nproc-per-node 1"), (":29500", f":{port}")):
        assert theirs in script
        script = script.replace(theirs, ours)
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "run.toml").write_text(
        RUN.replace('"shards"', f'"{shards}"').replace("every = 4", "every = 0")
    )
    (tmp_path / "bin").mkdir()
    hosts = "#!/bin/bash\n[ \"$*\" = 'show hostnames two-nodes' ] && printf '127.0.0.1\\n127.0.0.2\\n'\n"
    for name, content in (("srun", SRUN), ("torchrun", TORCHRUN), ("scontrol", hosts)):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)

    def submit(number: int) -> "subprocess.Popen[str]":
        slurm = {"SLURM_JOB_ID": str(number), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "two-nodes"}
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        (tmp_path / "tasks").unlink(missing_ok=True)
        return subprocess.Popen(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env=os.environ | slurm | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    job = submit(1)
    wait_for(2, run=tmp_path / "run", process=job)
    tasks = (tmp_path / "tasks").read_text().split()
    ranks = [Path(f"/proc/{task}/task/{task}/children").read_text() for task in tasks]
    for process in [*" ".join(ranks).split(), *tasks]:
        os.kill(int(process), signal.SIGTERM)
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 1, output
    saved = newest(tmp_path / "run" / "checkpoints")
    taken = max(losses(tmp_path / "run"))
    assert saved, output
    assert saved.name == f"step-{taken:08d}"
    assert 2 <= taken < 30
    job = submit(2)
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    assert f"2 ranks on cpu, step {taken} to 30 of 30" in output
    assert list(losses(tmp_path / "run")) == list(range(1, 31))
