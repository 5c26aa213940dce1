#!/usr/bin/env python3
"""Starts one training job on two hosts in each way that docs/hosts.md describes: by hand, `torchspan run`, torchrun,
mpirun and Slurm. All must end well with the same result.

The hosts are network namespaces connected by a virtual Ethernet pair, each with its own host name and boot id. Needs
root, `ip`, `nsenter` and `unshare`; skips itself with exit code 77 otherwise, and skips launchers that are missing.
"""
import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "soak"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import slurm  # noqa: E402
import survive  # noqa: E402

SKIPPED = 77
ADDRESSES = ("10.78.0.1", "10.78.0.2")
LIMIT = 180  # seconds for a job, on a busy machine
LEAST_BYTES = 1 << 20  # that each host sends the other: gradients, which no launcher sends


class Host:
    """A network namespace, a host name and a boot id."""

    def __init__(self, folder, number):
        self.name = f"node{number}"
        self.address = ADDRESSES[number]
        self.boot_id = folder / f"boot_id{number}"
        self.boot_id.write_text(f"{uuid.uuid4()}\n")
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])

    def enter(self):
        return ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--"]

    def command(self, *words):
        """What runs a program on this host."""
        setup = f"hostname {self.name} && mount --bind {self.boot_id} /proc/sys/kernel/random/boot_id && exec \"$@\""
        return [*self.enter(), "unshare", "--mount", "--uts", "sh", "-c", setup, "sh", *map(str, words)]

    def run(self, *words):
        return subprocess.run([*self.enter(), *words], check=True, stdout=subprocess.PIPE, text=True).stdout

    def bytes_sent(self):
        """Over its network, since it exists."""
        return int(re.search(r"eth0:\s+(\d+ +){8}(\d+)", self.run("cat", "/proc/net/dev")).group(2))


class Hosts:
    """Two hosts and the job that every launcher starts on them."""

    def __init__(self, folder, binaries):
        self.folder = folder
        self.binaries = binaries
        self.secret = folder / "secret"
        self.secret.write_text(os.urandom(32).hex() + "\n")
        self.secret.chmod(0o600)
        data = folder / "data"
        data.mkdir()
        survive.write_images(data)
        self.train = [binaries / "fashion_mnist_ddp", "--data", data, "--batch", "16", "--epochs", "1", "--lr", "0.004",
                      "--no-compare"]
        self.environment = {**os.environ, "TORCHSPAN_SECRET_FILE": str(self.secret), "OMP_NUM_THREADS": "1",
                            "HOME": str(folder), "TORCHSPAN_JOIN_TIMEOUT": "120"}
        self.hosts = [Host(folder, number) for number in (0, 1)]

    def __enter__(self):
        near, far = self.hosts
        try:
            for host in self.hosts:
                # Until its holder is in the new namespace, commands would change this one's.
                slurm.wait_for("a network namespace", 10, lambda host=host: os.readlink(
                    f"/proc/{host.holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
                host.run("ip", "link", "set", "lo", "up")
            near.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(far.holder.pid))
            for host in self.hosts:
                host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
                host.run("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for host in self.hosts:
            host.holder.kill()
            host.holder.wait()

    def start(self, number, name, *words, environment=None):
        """Starts a program on a host; its output is in a file of the folder."""
        output = self.folder / f"{name}.{number}.out"
        with output.open("wb") as file:
            job = subprocess.Popen(self.hosts[number].command(*words), env={**self.environment, **(environment or {})},
                                   stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
        job.output = output
        return job

    def finish(self, name, jobs):
        """Waits for the programs of a job and returns its result."""
        try:
            for job in jobs:
                survive.require(job.wait(LIMIT) == 0, f"{name}: a program ended with code {job.returncode}")
        except (survive.Lost, subprocess.TimeoutExpired) as lost:
            for job in jobs:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
            for job in jobs:
                print(f"--- {job.output.name}\n{job.output.read_text(errors='replace')[-3000:]}")
            raise survive.Lost(str(lost)) from lost
        text = "".join(job.output.read_text(errors="replace") for job in jobs)
        return result_of(name, text)


def result_of(name, text):
    found = re.findall(r"test accuracy[^\d]*([\d.]+)", text)
    survive.require(found, f"{name}: the job reports no accuracy:\n{text[-3000:]}")
    return found[-1]


def by_hand(hosts):
    """MASTER_ADDR and its companions, as in the guide's first section."""
    jobs = []
    for rank in (0, 1):
        variables = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
                     "RANK": str(rank), "LOCAL_RANK": "0"}
        jobs.append(hosts.start(rank, "by_hand", *hosts.train, environment=variables))
    return hosts.finish("by hand", jobs)


def torchspan_run(hosts):
    jobs = [hosts.start(rank, "torchspan", hosts.binaries / "torchspan", "run", "--nnodes", "2", "--node-rank", rank,
                        "--rdzv", f"{ADDRESSES[0]}:29501", "-n", "1", *hosts.train) for rank in (1, 0)]
    return hosts.finish("torchspan run", jobs)


def torchrun(hosts):
    # torchrun of PyTorch 1.13 fails under Python 3.11 unless exactly one stream is redirected.
    jobs = [hosts.start(rank, "torchrun", "torchrun", "--no_python", "--nnodes=2", f"--node_rank={rank}",
                        "--nproc_per_node=1", f"--master_addr={ADDRESSES[0]}", "--master_port=29502", "--redirects=1",
                        "--tee=1", f"--log_dir={hosts.folder}/torchrun-logs{rank}", *hosts.train) for rank in (0, 1)]
    return hosts.finish("torchrun", jobs)


def mpirun(hosts):
    """mpirun on the first host; in place of ssh, a script enters the other one.

    Hosts are given by name: of addresses, Open MPI 5 uses the first one only.
    """
    agent = hosts.folder / "enter"
    far = hosts.hosts[1].command("sh", "-c")
    agent.write_text("#!/bin/bash\nshift\nexec " + " ".join(f"'{word}'" for word in far) + " \"$*\"\n")
    agent.chmod(0o755)
    network = "10.78.0.0/24"
    environment = {"OMPI_MCA_plm_rsh_agent": str(agent), "OMPI_MCA_oob_tcp_if_include": network,
                   "OMPI_MCA_orte_tmpdir_base": str(hosts.folder),
                   # the same for Open MPI 5
                   "PRTE_MCA_plm_ssh_agent": str(agent), "PRTE_MCA_prte_if_include": network,
                   "PRTE_MCA_prte_tmpdir_base": str(hosts.folder), "PMIX_MCA_ptl_tcp_if_include": network}
    job = hosts.start(0, "mpirun", "mpirun", "-n", "2", "--host", "node0:1,node1:1",
                      "--allow-run-as-root", "-x", f"MASTER_ADDR={ADDRESSES[0]}", "-x", "MASTER_PORT=29503",
                      "-x", "TORCHSPAN_SECRET_FILE", "-x", "TORCHSPAN_JOIN_TIMEOUT", "-x", "OMP_NUM_THREADS", "-x", "HOME",
                      *hosts.train, environment=environment)
    return hosts.finish("mpirun", [job])


class Cluster(slurm.Cluster):
    """Slurm with a node on each host; its controller and srun are on the first one."""

    def __init__(self, folder, hosts):
        super().__init__(folder)
        self.hosts = hosts
        path = folder / "slurm.conf"
        text = re.sub(r"^SlurmctldHost=.*$", f"SlurmctldHost=node0({ADDRESSES[0]})", path.read_text(), flags=re.M)
        nodes = "\n".join(f"NodeName=n{i + 1} NodeHostname=node{i} NodeAddr={ADDRESSES[i]} Port={27900 + i} "
                          f"CPUs={os.cpu_count()} State=UNKNOWN" for i in (0, 1))
        path.write_text(re.sub(r"^NodeName=.*$", nodes, text, flags=re.M))

    def start(self, *command):
        # Only the second slurmd is on the second host.
        number = 1 if command[0] == "slurmd" and command[-1] == "n2" else 0
        with (self.folder / f"{command[0]}-{len(self.daemons)}.out").open("wb") as output:
            self.daemons.append(subprocess.Popen(self.hosts[number].command(*command), env=self.environment,
                                                 stdin=subprocess.DEVNULL, stdout=output, stderr=output))

    def run(self, *command, **options):
        return super().run(*self.hosts[0].command(*command), **options)


def srun(hosts):
    folder = hosts.folder / "slurm"
    folder.mkdir()
    folder.chmod(0o755)
    variables = {name: hosts.environment[name] for name in ("TORCHSPAN_SECRET_FILE", "HOME", "TORCHSPAN_JOIN_TIMEOUT")}
    with Cluster(folder, hosts.hosts) as cluster:
        return result_of("srun", cluster.run("srun", "-N2", "-n2", "--kill-on-bad-exit=1", *hosts.train,
                                             environment=variables, limit=LIMIT))


def skip(reason):
    print(f"skipped: {reason}")
    return SKIPPED


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, default=Path("build/dev/bin"), help="folder of the programs")
    parser.add_argument("--only", help="one way: " + ", ".join(("by_hand", "torchspan_run", "torchrun", "mpirun", "srun")))
    options = parser.parse_args()
    if os.geteuid() != 0:
        return skip("network namespaces need root")
    missing = [name for name in ("ip", "nsenter", "unshare") if not shutil.which(name)]
    if missing:
        return skip(f"{', '.join(missing)} are missing (packages iproute2, util-linux)")
    if "HOSTS_TEST_NAMESPACE" not in os.environ:
        # Containers may forbid mount namespaces; in a chroot, / is no mount point.
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
            return skip("'unshare -m true' fails here: a container needs --privileged")
        os.environ["HOSTS_TEST_NAMESPACE"] = "private"
        os.execvp("unshare", ["unshare", "-m", sys.executable, "-B", *sys.argv])
    needs = {by_hand: (), torchspan_run: (), torchrun: ("torchrun",), mpirun: ("mpirun",), srun: slurm.PROGRAMS}
    with tempfile.TemporaryDirectory(prefix="hosts-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{ADDRESSES[i]} node{i} n{i + 1}\n" for i in (0, 1)))
        subprocess.run(["mount", "--bind", str(names), "/etc/hosts"], check=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        results = {}
        try:
            with Hosts(folder, options.bin.resolve()) as hosts:
                for way, programs in needs.items():
                    absent = [program for program in programs if not shutil.which(program)]
                    if options.only not in (None, way.__name__):
                        continue
                    if absent:
                        print(f"  {way.__name__}: skipped, because {', '.join(absent)} are not installed", flush=True)
                        continue
                    before = [host.bytes_sent() for host in hosts.hosts]
                    results[way.__name__] = way(hosts)
                    sent = [host.bytes_sent() - old for host, old in zip(hosts.hosts, before)]
                    survive.require(min(sent) > LEAST_BYTES, f"{way.__name__}: the hosts sent each other {sent} bytes only")
                    print(f"  {way.__name__}: the job ran on two hosts, which sent {sent[0] >> 20} and {sent[1] >> 20} MiB; "
                          f"accuracy {results[way.__name__]}", flush=True)
            survive.require(len(set(results.values())) == 1, f"the results differ: {results}")
        except survive.Lost as lost:
            print(f"FAILED: {lost}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
