#!/usr/bin/env python3
"""Runs the Slurm script of docs/launch.md, and a job over two nodes, in a cluster of its own.

Starts munged, slurmctld and two slurmd on this machine, in a private mount namespace; other installations of Slurm
are not touched. Needs root and Debian's slurm-wlm and munge (tools/install-deps slurm); skips itself with exit code
77 otherwise.
"""
import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "soak"))
import survive  # noqa: E402

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare")
SKIPPED = 77

CONFIGURATION = """\
ClusterName=torchspan
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/builtin
ReturnToService=2
KillWait=10
NodeName=n1,n2 NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    """Adjacent ports that are free now."""
    for first in range(27000, 32000, count):
        try:
            sockets = [socket.create_server(("127.0.0.1", first + i)) for i in range(count)]
        except OSError:
            continue
        for one in sockets:
            one.close()
        return first
    raise survive.Lost("no free ports")


def wait_for(what, seconds, condition):
    end = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        survive.require(time.monotonic() < end, f"{what}: not within {seconds} s")
        time.sleep(0.2)


class Cluster:
    """Slurm with nodes n1 and n2. Leaving the context ends its daemons and its jobs."""

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        first = free_ports(3)
        for name in ("state", "spool.n1", "spool.n2"):
            (folder / name).mkdir()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        (folder / "slurm.conf").write_text(CONFIGURATION.format(
            host=socket.gethostname(), folder=folder, port=first, first=first + 1, last=first + 2,
            cores=os.cpu_count()))
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1",
                            "TMPDIR": str(folder / "tmp")}
        (folder / "tmp").mkdir()

    def __enter__(self):
        try:
            self.start("munged", "--foreground", f"--socket={self.folder}/munge.socket", f"--key-file={self.folder}/key",
                       f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
                       f"--seed-file={self.folder}/munged.seed")
            wait_for("munged", 20, (self.folder / "munge.socket").exists)
            self.start("slurmctld", "-D")
            for node in ("n1", "n2"):
                self.start("slurmd", "-D", "-N", node)
            wait_for("two idle nodes", 60, lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if len(self.daemons) > 1:
            self.run("scancel", "--state=RUNNING", "--state=PENDING", "-u", "root", check=False)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def start(self, *command):
        with (self.folder / f"{command[0]}-{len(self.daemons)}.out").open("wb") as output:
            self.daemons.append(subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                                                 stderr=output))

    def run(self, *command, check=True, environment=None, limit=300):
        done = subprocess.run(command, env={**self.environment, **(environment or {})}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit, check=False)
        survive.require(not check or done.returncode == 0, f"{' '.join(command)}: code {done.returncode}\n{done.stdout}")
        return done.stdout


def script_of_the_guide():
    """The batch script in docs/launch.md."""
    text = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    return re.search(r"^## Slurm\n.*?```\n(#!/bin/bash\n.*?)```", text, re.S | re.M).group(1)


def adapted_script(binaries, train):
    """The guide's script with the test's program, and times that suit a test. Slurm may send the signal up to 60
    seconds early."""
    script = script_of_the_guide()
    for old, new in (("--cpus-per-task=16", "--cpus-per-task=1"), ("--time=4:00:00", "--time=2"), ("USR1@120", "USR1@20"),
                     ("--grace 110s", "--grace 40s"), ("srun torchspan", f"srun {binaries}/torchspan"),
                     ("-n 4", "-n 2"), ("./train", " ".join(train))):
        survive.require(script.count(old) == 1, f"the guide's script has no single '{old}'")
        script = script.replace(old, new)
    return script


def test_preemption(cluster, binaries, data):
    """The script of the guide: signal before the time limit, checkpoint, requeue, resume."""
    work = cluster.folder
    checkpoint = work / "preempted"
    train = [str(binaries / "fashion_mnist_ddp"), "--data", str(data), "--batch", "16", "--epochs", "100000", "--lr", "0.004",
             "--no-compare", "--checkpoint", str(checkpoint), "--checkpoint-every", "100000"]
    (work / "script").write_text(adapted_script(binaries, train))
    output = work / "preempted.out"
    job = cluster.run("sbatch", "--parsable", f"--output={output}", str(work / "script")).strip()
    print(f"  script of the guide: job {job}", flush=True)

    def found(pattern):
        return re.search(pattern, output.read_text(errors="replace")) if output.exists() else None

    try:
        saved = wait_for("preemption", 240, lambda: found(r"preempted: the state after step (\d+) of")).group(1)
        wait_for("exit code for requeueing", 60, lambda: found(r"exit code: 85"))
        print(f"  preempted by Slurm after step {saved}", flush=True)
        resumed = wait_for("second start", 180, lambda: found(r"resumed after step (\d+)")).group(1)
        survive.require(resumed == saved, f"it resumed after step {resumed}")
        restarts = re.search(r"Restarts=(\d+)", cluster.run("scontrol", "show", "job", job)).group(1)
        survive.require(restarts == "1", f"Slurm counts {restarts} restarts of job {job}")
        print(f"  requeued by the script, and resumed after step {resumed}", flush=True)
        cluster.run("scancel", job)
        wait_for("end of the job", 90, lambda: "CANCELLED" in cluster.run("scontrol", "show", "job", job))
    except survive.Lost:
        print(output.read_text(errors="replace") if output.exists() else "no output")
        raise


def test_two_nodes(cluster, binaries, data):
    """srun alone starts a job over two nodes; a signal to it makes all ranks save and end with code 0."""
    work = cluster.folder
    secret = work / "secret"
    secret.write_text(os.urandom(32).hex() + "\n")
    secret.chmod(0o600)
    environment = {"TORCHSPAN_SECRET_FILE": str(secret)}
    train = [str(binaries / "fashion_mnist_ddp"), "--data", str(data), "--batch", "16", "--lr", "0.004", "--no-compare",
             "--checkpoint", str(work / "nodes")]
    srun = ["srun", "-N2", "-n2", "--kill-on-bad-exit=1"]
    with (work / "nodes.out").open("wb") as output:
        job = subprocess.Popen([*srun, *train, "--epochs", "100000"], env={**cluster.environment, **environment},
                               stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        wait_for("first checkpoint", 120, lambda: job.poll() is not None or list((work / "nodes").glob("step-*[0-9]")))
        job_id = cluster.run("squeue", "-h", "-o", "%i").split()
        survive.require(len(job_id) == 1, f"squeue shows jobs {job_id}")
        cluster.run("scancel", "--signal=USR1", job_id[0])
        survive.require(job.wait(120) == 0, f"srun ended with {job.returncode}")
        saved = re.search(r"preempted: the state after step (\d+) of", (work / "nodes.out").read_text())
        survive.require(saved, "no rank reports the preemption")
        step = int(saved.group(1))
        text = cluster.run(*srun, *train, "--epochs", str(step // 20 + 2), environment=environment)
        survive.require(f"resumed after step {step}" in text and "test accuracy" in text, text)
    except (survive.Lost, subprocess.TimeoutExpired):
        job.kill()
        print((work / "nodes.out").read_text(errors="replace"))
        raise
    print(f"  two nodes: preempted after step {step} on both, resumed and finished", flush=True)


def skip(reason):
    print(f"skipped: {reason}")
    return SKIPPED


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, default=Path("build/dev/bin"), help="folder of the programs")
    parser.add_argument("--only", choices=("script", "nodes"))
    options = parser.parse_args()
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return skip(f"{', '.join(missing)} are missing: run tools/install-deps slurm")
    if os.geteuid() != 0:
        return skip("Slurm's daemons and mounting need root")
    if "SLURM_TEST_NAMESPACE" not in os.environ:
        # Containers may forbid mount namespaces; in a chroot, / is no mount point.
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
            return skip("'unshare -m true' fails here: a container needs --privileged")
        os.environ["SLURM_TEST_NAMESPACE"] = "private"
        os.execvp("unshare", ["unshare", "-m", sys.executable, "-B", *sys.argv])
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        hosts = folder / "hosts"
        hosts.write_text(Path("/etc/hosts").read_text() + "127.0.0.1 n1 n2\n")
        subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
        data = folder / "data"
        data.mkdir()
        survive.write_images(data)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            with Cluster(folder) as cluster:
                if options.only != "nodes":
                    test_preemption(cluster, options.bin.resolve(), data)
                if options.only != "script":
                    test_two_nodes(cluster, options.bin.resolve(), data)
        except survive.Lost as lost:
            print(f"FAILED: {lost}")
            for log in sorted(folder.glob("*.out")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
