#!/usr/bin/env python3
"""Kills a worker under torchrun and under mpirun: the job resumes from its checkpoint, with the result of an
undisturbed one. torchrun restarts the workers; mpirun ends the job, and the next mpirun resumes.

Skips a launcher that is not installed; exit code 77 if neither is.
"""
import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "soak"))
import survive  # noqa: E402

SKIPPED = 77


def make_job(options, work, name, launcher, command):
    """A job of two workers with the checkpoint folder `name`, started by `launcher`."""
    job = survive.Job(options.bin, work, 2, command, work / name)
    start = job.command.index(str(options.bin / command[0]))
    job.command = [*launcher, *job.command[start:]]
    job.variables = {"TORCHSPAN_SECRET_FILE": str(work / "secret"), "HOME": str(work)}
    return job


def kill_a_worker(job):
    """Kills rank 1 after the first checkpoint."""
    reached = survive.wait_until(job, lambda: job.checkpoint.exists() and survive.committed(job.checkpoint), 120)
    survive.require(reached, "the job wrote no checkpoint while it ran")
    os.kill(rank_of(job, 1), signal.SIGKILL)


def rank_of(job, rank):
    names = (b"RANK", b"OMPI_COMM_WORLD_RANK")
    found = [pid for pid, environment in survive.processes_of(job.mark).items()
             if str(rank).encode() in [environment.get(name) for name in names]]
    survive.require(found, f"there is no process of rank {rank}")
    return found[0]


def passes(job, check):
    """Runs check(); reports what is lost, and ends every process of the job."""
    try:
        check()
    except survive.Lost as lost:
        survive.report(lost, job)
        return False
    finally:
        job.kill_all()
    return True


def finish_resumed(job, expected, launcher):
    """Waits for a job that was started from a checkpoint; its result is the undisturbed one."""
    survive.require(job.wait() == 0, f"{launcher} failed")
    survive.require("resumed after step" in job.output.read_text(), "the workers started from the beginning")
    survive.compare(expected, survive.read_newest(job.checkpoint))
    job.expect_no_process()


def torchrun(options, work, command, expected):
    # torchrun of PyTorch 1.13 fails under Python 3.11 unless exactly one stream is redirected.
    launcher = ["torchrun", "--no_python", "--nproc_per_node=2", "--max_restarts=3", "--standalone", "--redirects=1",
                "--tee=1", f"--log_dir={work}/logs"]
    job = make_job(options, work, "torchrun", launcher, command)

    def check():
        job.start()
        kill_a_worker(job)
        finish_resumed(job, expected, "torchrun")
        print("  torchrun: restarted the workers after SIGKILL to rank 1; the result is equal", flush=True)

    return passes(job, check)


def mpirun(options, work, command, expected):
    launcher = ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", "-x", "TORCHSPAN_SECRET_FILE"]
    job = make_job(options, work, "mpirun", launcher, command)

    def check():
        job.start()
        kill_a_worker(job)
        survive.require(job.wait() != 0, "mpirun succeeded although a rank was killed")
        job.expect_no_process()
        job.output.write_bytes(b"")
        job.start()
        finish_resumed(job, expected, "the second mpirun")
        print("  mpirun: ended after SIGKILL to rank 1; the next one resumed, and the result is equal", flush=True)

    return passes(job, check)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, default=Path("build/dev/bin"), help="folder of the programs")
    options = parser.parse_args()
    options.bin = options.bin.resolve()
    present = [test for test in (torchrun, mpirun) if shutil.which(test.__name__)]
    for test in (torchrun, mpirun):
        if test not in present:
            print(f"  {test.__name__}: skipped, because it is not installed")
    if not present:
        return SKIPPED
    with tempfile.TemporaryDirectory(prefix="survive-") as folder:
        work = Path(folder)
        (work / "secret").write_text(os.urandom(32).hex() + "\n")
        (work / "secret").chmod(0o600)
        survive.write_images(work)
        _, command = survive.programs(work)["ddp"]
        reference = survive.Job(options.bin, work, 2, command, work / "reference")
        reference.start()
        if reference.wait() != 0:
            survive.report("the undisturbed training failed", reference)
            return 1
        expected = survive.read_newest(reference.checkpoint)
        return 0 if all([test(options, work, command, expected) for test in present]) else 1


if __name__ == "__main__":
    sys.exit(main())
