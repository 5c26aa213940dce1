"""Two network namespaces, as two hosts: groups and calls between them, of which a capture of the network shows nothing."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

PLAIN = b"these bytes must not be seen "
PORT = 29611


def program(rank, address):
    """What each host runs; prints one line of JSON."""
    import torch
    import torch.distributed as dist
    from torch.distributed import rpc

    import torchspan

    torch.set_num_threads(1)
    method = f"tcp://{address}:"
    if "TORCHSPAN_SECRET_FILE" not in os.environ:
        try:
            dist.init_process_group("torchspan", init_method=method + str(PORT + 2), rank=rank, world_size=2)
        except torchspan.errors.InvalidError as error:
            print(json.dumps(str(error)))
        return
    mine = torch.frombuffer(bytearray(PLAIN * 1000), dtype=torch.uint8)
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=2, backend=rpc.BackendType.TORCHSPAN,
        rpc_backend_options=torchspan.torch_rpc.TorchSpanRpcBackendOptions(init_method=method + str(PORT)),
    )
    there_and_back = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(mine, 0))
    text = rpc.rpc_sync(f"worker{1 - rank}", bytes.upper, args=(PLAIN,))
    dist.init_process_group("torchspan", init_method=method + str(PORT + 1), rank=rank, world_size=2)
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine)
    dist.destroy_process_group()
    rpc.shutdown()
    print(json.dumps([torch.equal(there_and_back, mine), text == PLAIN.upper(), torch.equal(parts[1 - rank], mine)]))


class Namespaces:
    """Two namespaces of this host, connected by a pair of devices."""

    def __enter__(self):
        self.names = [f"torchspan-{os.getpid()}-{i}" for i in range(2)]
        devices = [f"tsp{os.getpid() % 100000}{side}" for side in "ab"]
        for name in self.names:
            self.ip("netns", "add", name)
        self.ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for i, (name, device) in enumerate(zip(self.names, devices)):
            self.ip("link", "set", device, "netns", name)
            for command in (["addr", "add", f"10.87.0.{i + 1}/24", "dev", device], ["link", "set", device, "up"],
                            ["link", "set", "lo", "up"]):
                self.ip("-n", name, *command)
        return self

    def __exit__(self, *_):
        for name in self.names:
            self.ip("netns", "delete", name)

    @staticmethod
    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def capture(self, index):
        """A socket that gets all packets of one namespace."""
        made = []

        def enter_and_open():  # a thread has its own namespace
            with open(f"/var/run/netns/{self.names[index]}", encoding="ascii") as handle:
                os_setns(handle.fileno())
            made.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))

        thread = threading.Thread(target=enter_and_open)
        thread.start()
        thread.join()
        return made[0]


def os_setns(descriptor):
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@unittest.skipUnless(os.geteuid() == 0 and shutil.which("ip"), "needs root and the program ip, for network namespaces")
class Hosts(unittest.TestCase):
    def test_groups_and_calls_between_hosts_show_nothing_to_the_network(self):
        folder = tempfile.mkdtemp()
        with os.fdopen(os.open(folder + "/secret", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(32))
        with Namespaces() as namespaces:
            seen, ended = bytearray(), threading.Event()
            packets = namespaces.capture(1)
            packets.settimeout(0.2)

            def read():
                while not ended.is_set():
                    try:
                        seen.extend(packets.recv(1 << 17)[54:])
                    except TimeoutError:
                        pass

            reader = threading.Thread(target=read)
            reader.start()
            try:
                results = self.results_of_hosts(namespaces, {"TORCHSPAN_SECRET_FILE": folder + "/secret"})
            finally:
                ended.set()
                reader.join()
                packets.close()
        self.assertEqual(results, [[True] * 3] * 2)
        self.assertGreater(len(seen), 2 * len(PLAIN) * 1000)
        self.assertNotIn(PLAIN, seen)
        self.assertIn(b"torchspan/store", seen)  # of torch's own store, which is in the clear

    def test_hosts_without_a_common_secret_are_refused_and_learn_what_to_do(self):
        with Namespaces() as namespaces:
            texts = self.results_of_hosts(namespaces, {"HOME": tempfile.mkdtemp()})
        for text in texts:
            self.assertRegex(text, "no cluster secret in .* on several hosts.* or set TORCHSPAN_SECRET_FILE to a file that all can read")
        self.assertRegex(texts[1], "rank 0 cannot open the world")

    @staticmethod
    def results_of_hosts(namespaces, environment):
        """What program() prints on each host."""
        inherited = {name: value for name, value in os.environ.items() if name != "TORCHSPAN_SECRET_FILE"}
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, str(rank), "10.87.0.1"], stdout=subprocess.PIPE,
                text=True, env={**inherited, "TP_SOCKET_IFNAME": "", "MASTER_ADDR": "10.87.0.1", **environment},
            )
            for rank, name in enumerate(namespaces.names)
        ]
        try:
            return [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    program(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 2 else unittest.main()
