#!/usr/bin/env python3
"""Kills training jobs at random moments and checks that they lose nothing.

Three example programs run under `torchspan run --max-restarts` with checkpoints: the model-parallel demo, data
parallelism and a pipeline. Random workers and the launcher get signals while the workers meet, restore, train
and save. A killed launcher is started again. At the end of every round the last checkpoint must equal, bit for
bit, that of a training without disturbances, and no process, file or folder may be left. With 50 signals or more, every
kind of moment, every rank and the launcher must have been hit. With root rights, the disk also becomes full, read-only
or unreadable while a job saves.
"""
import argparse
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARK = "SURVIVE_JOB"
LIMIT = 180  # seconds that a job may take without a kill, on a busy machine
ENOUGH = 50  # signals after which every kind of moment and every process must have been hit


class Lost(Exception):
    """What a job must not do."""


def require(good, text):
    if not good:
        raise Lost(text)


# --- Input


def write_images(folder):
    """Writes IDX files: class c has a bright bar, c + 1 bars from the top."""
    def idx(sizes, data):
        return struct.pack(">HBB", 0, 8, len(sizes)) + struct.pack(f">{len(sizes)}I", *sizes) + data

    for prefix, count in (("train", 320), ("t10k", 60)):
        labels = bytes(i % 10 for i in range(count))
        images = bytearray(count * 784)
        for i, label in enumerate(labels):
            start = i * 784 + (label + 1) * 56
            images[start:start + 56] = bytes(200 + (i + pixel) % 50 for pixel in range(56))
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx((count, 28, 28), bytes(images)))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx((count,), labels))


def write_text(path):
    path.write_text("".join(f"the whale, the white whale; call me {i % 10}\n" for i in range(60)))


def programs(data):
    """Name, number of workers and command of each program, without --checkpoint."""
    images = ["--data", str(data), "--batch", "16", "--epochs", "6", "--lr", "0.004",
              "--checkpoint-every", "5"]
    return {
        "demo": (3, ["fashion_mnist_model_parallel", *images]),
        "ddp": (2, ["fashion_mnist_ddp", *images, "--no-compare"]),
        "pipeline": (2, ["char_transformer_pipeline", "--text", str(data / "text"), "--width", "16", "--heads", "2",
                         "--context", "16", "--batch", "8", "--prompt", "call", "--sample", "5", "--dropout", "0.1",
                         "--steps", "120", "--checkpoint-every", "5"]),
    }


# --- Checkpoints


def committed(folder):
    """Folders of complete checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob("step-*/manifest.json") if ".partial-" not in path.parent.name)


def read_newest(folder):
    """Step, values, and bytes, dtype and shape of every tensor of the newest checkpoint."""
    found = committed(folder)
    require(found, f"there is no checkpoint in {folder}")
    manifest = json.loads((found[-1] / "manifest.json").read_text())["manifest"]
    index = json.loads((found[-1] / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: (found[-1] / name).read_bytes() for name in set(index.values())}
    tensors = {}
    for name, file in index.items():
        # LibTorch seeds the default generators, which these programs do not use, with random numbers, and its
        # archives of optimizers name parameters by their addresses.
        if name.startswith("rng.") or name.endswith(".archive"):
            continue
        size = struct.unpack("<Q", files[file][:8])[0]
        entry = json.loads(files[file][8:8 + size])[name]
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], files[file][8 + size + begin:8 + size + end])
    return {"step": manifest["step"], "values": manifest.get("values"), "tensors": tensors}


def compare(expected, got):
    for key in ("step", "values"):
        require(expected[key] == got[key], f"the {key} are {got[key]} instead of {expected[key]}")
    require(expected["tensors"].keys() == got["tensors"].keys(), "the checkpoint has other tensors")
    differing = [name for name, value in expected["tensors"].items() if got["tensors"][name] != value]
    require(not differing, f"tensors differ from those of the undisturbed training: {', '.join(differing)}")


# --- Processes


def environment_of(pid):
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(entry.split(b"=", 1) for entry in block.split(b"\0") if b"=" in entry)


def processes_of(mark):
    """Environment by process id, of all processes with this mark except zombies."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            environment = environment_of(entry)
            if environment.get(MARK.encode()) == mark.encode():
                found[int(entry)] = environment
    return found


def children_of(pid):
    """Environment by process id, of the children of a process: faster than a search through all processes."""
    found = {}
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found[int(child)] = environment_of(child)
    except OSError:  # the process has ended
        pass
    return found


def shared_memory():
    """Shared memory with a name, except that of simulated devices, which other tests may create meanwhile."""
    return [path for path in Path("/dev/shm").iterdir()
            if "torchspan" in path.name and "stand-in" not in path.name and "fake-" not in path.name]


class Job:
    """A launcher with its workers, and what it may leave behind."""

    def __init__(self, binaries, work, workers, command, checkpoint, restarts=1000):
        self.work = work
        self.checkpoint = checkpoint
        self.mark = f"{os.getpid()}-{random.getrandbits(64):x}"
        self.temporary = work / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.output = work / "output"
        self.command = [str(binaries / "torchspan"), "run", "-n", str(workers), "--max-restarts", str(restarts),
                        "--restart-backoff", "1ms", "--max-backoff", "1ms", "--give-up-after", "0",
                        str(binaries / command[0]), *command[1:], "--checkpoint", str(checkpoint)]
        self.launcher = None
        self.variables = {}  # besides those that every job gets
        self.shared_memory = set(shared_memory())
        self.output.write_bytes(b"")

    def start(self, through=()):
        """Starts the launcher; `through` is a command that executes it."""
        variables = {"PATH": os.environ["PATH"], "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", MARK: self.mark,
                     **self.variables}
        if "ASAN_OPTIONS" in os.environ:
            variables["ASAN_OPTIONS"] = os.environ["ASAN_OPTIONS"]
        with self.output.open("ab") as output:
            self.launcher = subprocess.Popen([*through, *self.command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                             env=variables)

    def workers(self):
        """Process id by rank."""
        return {int(env[b"RANK"]): pid for pid, env in children_of(self.launcher.pid).items() if b"RANK" in env}

    def ended(self):
        return self.launcher.poll() is not None

    def wait(self):
        try:
            return self.launcher.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Lost(f"the job still runs after {LIMIT} s") from None

    def expect_no_process(self):
        end = time.monotonic() + 20
        while (left := processes_of(self.mark)) and time.monotonic() < end:
            time.sleep(0.01)
        require(not left, f"processes are left: {sorted(left)}")

    def expect_nothing_left(self):
        self.expect_no_process()
        left = [str(path) for path in self.temporary.iterdir()]
        left += [str(path) for path in self.checkpoint.iterdir()
                 if path.name.startswith("trash-") or ".partial" in path.name]
        left += [str(path) for path in set(shared_memory()) - self.shared_memory]
        require(not left, f"files are left: {left}")

    def kill_all(self):
        if self.launcher is not None and not self.ended():
            self.launcher.kill()
            self.launcher.wait()
        for pid in processes_of(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


# --- Moments


def is_restoring(pid, checkpoint):
    """Whether the process has mapped a file of a complete checkpoint."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
    return any(str(checkpoint) in line and ".partial-" not in line for line in maps.splitlines())


def wait_until(job, condition, seconds=15):
    end = time.monotonic() + seconds
    while not job.ended() and time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.0005)
    return False


class Moments:
    """Waits for a random moment in the life of a job. Counts what the signals hit."""

    KINDS = ("meeting", "restoring", "saving", "training")

    def __init__(self, chance):
        self.chance = chance
        self.seen = set()
        self.counts = {}

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    def expect_all(self, workers):
        wanted = [*self.KINDS, "the launcher", *(f"rank {rank}" for rank in range(workers))]
        missing = [what for what in wanted if what not in self.counts]
        require(not missing, f"no signal has hit: {', '.join(missing)}; repeat with another seed or more signals")

    def await_restore(self, job):
        """Kills a worker once there is a checkpoint, and waits until a process of the next attempt reads it."""
        if not wait_until(job, lambda: committed(job.checkpoint), LIMIT):
            return False
        former = set(job.workers().values())
        try:
            os.kill(self.chance.choice(sorted(former)), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return wait_until(job, lambda: any(is_restoring(pid, job.checkpoint)
                                           for pid in set(job.workers().values()) - former))

    def wait(self, job):
        kind = self.chance.choice((*self.KINDS, "saving"))
        if kind == "meeting":
            reached = wait_until(job, lambda: set(job.workers().values()) - self.seen)
            time.sleep(self.chance.uniform(0, 1.0))
        elif kind == "restoring":
            reached = self.await_restore(job)
        elif kind == "saving":
            reached = wait_until(job, lambda: any(job.checkpoint.glob("*.partial-*")))
            time.sleep(self.chance.choice((0, 0, self.chance.uniform(0, 0.005))))
        else:
            reached = wait_until(job, lambda: len(job.workers()) > 0)
            time.sleep(self.chance.uniform(0, 3.0))
        self.seen |= set(job.workers().values())
        return kind if reached else "late"


def strike(job, chance):
    """Sends a signal to a random process; returns the process and the signal, or None if there was no process."""
    workers = job.workers()
    targets = [*sorted(workers), "launcher"]
    target = chance.choice(targets)
    if target == "launcher":
        job.launcher.send_signal(signal.SIGKILL)
        job.launcher.wait()
        job.expect_no_process()
        job.start()
        return "the launcher", "SIGKILL"
    kind = chance.choice((signal.SIGKILL,) * 6 + (signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP))
    try:
        os.kill(workers[target], kind)
        if kind == signal.SIGSTOP:
            time.sleep(chance.uniform(0.1, 2.0))
            os.kill(workers[target], signal.SIGCONT)
    except ProcessLookupError:
        return None
    return f"rank {target}", kind.name


# --- Rounds


def disturbed_round(job, chance, moments, kills):
    """Runs a job to its end with up to `kills` signals; returns how many it got."""
    done = 0
    job.start()
    while not job.ended() and done < kills:
        kind = moments.wait(job)
        if job.ended():
            break
        struck = strike(job, chance)
        if struck is None:
            continue
        process, name = struck
        moments.count(kind)
        moments.count(process)
        done += 1
        print(f"    {kind}: {name} to {process}", flush=True)
    code = job.wait()
    require(code == 0, f"the job ended with code {code}")
    return done


def survive(name, workers, command, options, chance):
    with tempfile.TemporaryDirectory(prefix="survive-") as folder:
        work = Path(folder)
        reference = Job(options.bin, work, workers, command, work / "reference")
        try:
            reference.start()
            require(reference.wait() == 0, "the undisturbed training failed")
            reference.expect_nothing_left()
            expected = read_newest(work / "reference")
        except Lost as lost:
            report(lost, reference)
            return False
        finally:
            reference.kill_all()
        print(f"  {name}: {len(expected['tensors'])} tensors after step {expected['step']}", flush=True)
        done, rounds, moments = 0, 0, Moments(chance)
        while done < options.kills:
            job = Job(options.bin, work, workers, command, work / f"round{rounds}")
            try:
                done += disturbed_round(job, chance, moments, min(options.kills - done, chance.randint(1, 8)))
                compare(expected, read_newest(job.checkpoint))
                job.expect_nothing_left()
            except Lost as lost:
                report(lost, job)
                return False
            finally:
                job.kill_all()
            shutil.rmtree(job.checkpoint)
            rounds += 1
        try:
            if done >= ENOUGH:
                moments.expect_all(workers)
        except Lost as lost:
            print(f"FAILED: {lost}", flush=True)
            return False
        print(f"  {name}: {done} signals in {rounds} rounds, {moments.counts}: every result is equal", flush=True)
        return True


def report(lost, job):
    print(f"FAILED: {lost}\n--- last lines of {' '.join(job.command)}")
    print("\n".join(job.output.read_text(errors="replace").splitlines()[-60:]), flush=True)


# --- Disks


def in_namespace(script):
    """A prefix for a command, which first runs `script` in a private mount namespace."""
    return ["unshare", "-m", "sh", "-ec", f'{script}; exec "$@"', "sh"]


def as_nobody():
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def expect_error(job, through, text):
    """Runs the job, which must fail, restart once, fail again and name the checkpoint's folder and the reason."""
    job.output.write_bytes(b"")
    job.start(through)
    require(job.wait() != 0, "the job succeeded")
    output = job.output.read_text(errors="replace")
    for expected in (text, str(job.checkpoint), "attempt 1 failed"):
        require(expected in output, f"the output lacks '{expected}'")
    job.expect_no_process()


def fail_disks(work, workers, command, options):
    checkpoint = work / "checkpoints"
    reference = Job(options.bin, work, workers, command, work / "reference")
    reference.start()
    require(reference.wait() == 0, "the undisturbed training failed")
    expected = read_newest(reference.checkpoint)
    first = committed(reference.checkpoint)[0]
    size = sum(file.stat().st_size for file in first.iterdir())
    checkpoint.mkdir()
    job = Job(options.bin, work, workers, command, checkpoint, restarts=1)
    full = in_namespace(f"mount -t tmpfs -o size={size * 3 // 2048}k none {checkpoint}")
    expect_error(job, full, "No space left on device")
    require("resumed after step" in job.output.read_text(errors="replace"),
            "the checkpoint from before the disk was full is lost")
    print("  disks: full: the error names it, and the checkpoint before it is used", flush=True)
    shutil.copytree(first, checkpoint / first.name)
    mounted = in_namespace(f"mount --bind {checkpoint} {checkpoint}; mount -o remount,bind,ro {checkpoint}")
    expect_error(job, mounted, "Read-only file system")
    print("  disks: read-only: the error names it", flush=True)
    for folder in (work, job.temporary, job.output):
        folder.chmod(0o777)
    checkpoint.chmod(0o700)
    if subprocess.run([*as_nobody(), "test", "-x", job.command[0]], check=False).returncode == 0:
        expect_error(job, as_nobody(), "Permission denied")
        print("  disks: unreadable: the error names it", flush=True)
    else:
        print(f"  disks: unreadable: skipped, because other users cannot execute {job.command[0]}")
    job.output.write_bytes(b"")
    job.start()
    require(job.wait() == 0, "the job on a good disk failed")
    require("resumed after step" in job.output.read_text(), "it starts from the beginning")
    compare(expected, read_newest(checkpoint))
    job.expect_nothing_left()
    print("  disks: the next job resumes, and its result is equal", flush=True)


def survive_disks(workers, command, options):
    """A job whose disk fails ends with an error that names the folder; the next one loses nothing."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        print("  disks: skipped, because mounting needs root, unshare and setpriv")
        return True
    # Containers may forbid mount namespaces; in a chroot, / is no mount point.
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        print("  disks: skipped, because 'unshare -m true' fails here")
        return True
    with tempfile.TemporaryDirectory(prefix="survive-") as folder:
        try:
            fail_disks(Path(folder), workers, command, options)
        except Lost as lost:
            print(f"FAILED: {lost}\n{(Path(folder) / 'output').read_text(errors='replace')}", flush=True)
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, default=Path("build/dev/bin"), help="folder of the programs")
    parser.add_argument("--kills", type=int, default=50, help="signals for each program")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--only", choices=("demo", "ddp", "pipeline", "disks"))
    options = parser.parse_args()
    options.bin = options.bin.resolve()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(f"seed {options.seed}", flush=True)
    good = True
    with tempfile.TemporaryDirectory(prefix="survive-") as folder:
        data = Path(folder)
        os.chmod(data, 0o755)
        write_images(data)
        write_text(data / "text")
        for name, (workers, command) in programs(data).items():
            if options.only in (None, name):
                good = survive(name, workers, command, options, random.Random(f"{options.seed} {name}")) and good
        if options.only in (None, "disks"):
            good = survive_disks(*programs(data)["ddp"], options) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
