"""Device maps of torchspan.rpc: which are refused, and where tensors of a device other than the CPU arrive.

For the latter, TORCHSPAN_STAND_IN names a library that includes tests/support/stand_in_device.h, built against this torch.
"""

import os
import types
import unittest

import torch

import torchspan
from torchspan import rpc

from processes import Failed, Native, run

STAND_IN = os.environ.get("TORCHSPAN_STAND_IN")
if STAND_IN:
    torch.ops.load_library(STAND_IN)
    module = types.ModuleType("torch.privateuseone")
    for name, value in {"is_available": True, "device_count": 2, "current_device": 0, "_is_in_bad_fork": False, "_lazy_init": None}.items():
        setattr(module, name, lambda value=value: value)
    torch._register_device_module("privateuseone", module)


def place_of(tensor):
    return str(tensor.device), tensor.cpu().tolist()


def place_in(holder):
    return place_of(holder["x"])


def moved_to(device, values):
    return torch.tensor(values).to(device)


class Mapped(Native):
    """torchspan.rpc with a device map on rank 0."""

    def __init__(self, device_maps, **options):
        super().__init__(timeout=20, **options)
        self.device_maps = device_maps

    def begin(self):
        options = rpc.Options(init_method="file://" + self.store, rpc_timeout=self.timeout)
        for worker, device_map in self.device_maps.items() if self.rank == 0 else ():
            for here, there in device_map.items():
                options.set_device_map(worker, {here: there})
        rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=self.size, rpc_backend_options=options)


class DeviceMapsTest(unittest.TestCase):
    def refusal(self, device_maps, size=2):
        result = run(size, lambda rank, size: None, world=Mapped(device_maps))[0]
        self.assertIsInstance(result, Failed)
        return f"{result.type_name}: {result.text}"

    def test_wrong_maps_are_refused_and_name_the_workers_and_the_device(self):
        if not torch.cuda.is_available():
            text = self.refusal({"worker1": {"cuda:0": "cuda:0"}})
            self.assertRegex(text, "InvalidError: .*'worker0' .rank 0. has a device map for worker 'worker1' that names its own cuda:0")
        self.assertRegex(self.refusal({"nobody": {"cpu": "cpu"}}), "map for worker 'nobody', which is not in this world.*worker0, worker1")
        self.assertRegex(self.refusal({"worker1": {"cuda": "cuda:0"}}, 1), "InvalidError.*names 'cuda' without an index.*'cuda:0'")
        self.assertRegex(self.refusal({"worker1": {"cuda:0": "cuda:1", "cpu": "cuda:1"}}, 1), "one to one.*cuda:0 to cuda:1 and cpu to cuda:1")
        self.assertRegex(self.refusal({"worker1": {"toaster:0": "cpu"}}, 1), "ValueError: .*device map for worker 'worker1'.*toaster")
        self.assertRegex(self.refusal({"worker1": {"cpu": None}}, 1), "ValueError: .*device map for worker 'worker1'")

    def test_maps_of_cpus_are_allowed(self):
        def body(rank, size):
            return rpc.rpc_sync("worker1", place_of, args=(torch.ones(2),)) if rank == 0 else None

        self.assertEqual(run(2, body, world=Mapped({"worker1": {"cpu": "cpu"}}))[0], ("cpu", [1.0, 1.0]))

    @unittest.skipIf(torch.cuda.is_available(), "this process has GPUs")
    def test_a_device_that_the_other_worker_lacks_is_named(self):
        def body(rank, size):
            if rank != 0:
                return None
            try:
                rpc.rpc_sync("worker1", place_of, args=(torch.ones(2),))
            except Exception as error:
                return str(error)

        self.assertRegex(run(2, body, world=Mapped({"worker1": {"cpu": "cuda:3"}}))[0], "cuda:3.*worker1|worker1.*cuda:3")

    @unittest.skipUnless(STAND_IN, "TORCHSPAN_STAND_IN is not set")
    def test_tensors_travel_by_the_map_and_results_by_its_inverse(self):
        def body(rank, size):
            if rank != 0:
                return None
            here = [torch.tensor([1.0 + i]).to(f"privateuseone:{i}") for i in range(2)]
            found = [rpc.rpc_sync("worker1", place_of, args=(tensor,)) for tensor in here]
            pickled = rpc.rpc_sync("worker1", place_in, args=({"x": here[0], 1j: 2},))
            back = [rpc.rpc_sync("worker1", moved_to, args=(f"privateuseone:{i}", [5.0])) for i in range(2)]
            try:
                rpc.rpc_sync("worker2", place_of, args=(here[0],))
            except torchspan.errors.Error as error:
                refused = str(error)
            without = rpc.rpc_sync("worker0", place_of, args=(here[1],))
            return found, pickled, [place_of(tensor) for tensor in back], refused, without

        maps = {"worker1": {"privateuseone:0": "privateuseone:1", "privateuseone:1": "privateuseone:0"}, "worker2": {"cpu": "cpu"}}
        result = run(3, body, world=Mapped(maps))[0]
        self.assertNotIsInstance(result, Failed, result)
        found, pickled, back, refused, without = result
        self.assertEqual(found, [("privateuseone:1", [1.0]), ("privateuseone:0", [2.0])])
        self.assertEqual(pickled, ("privateuseone:1", [1.0]))
        self.assertEqual(back, [("privateuseone:1", [5.0]), ("privateuseone:0", [5.0])])
        self.assertRegex(refused, "privateuseone:0, which the device map of worker 'worker0' for worker 'worker2' does not contain")
        self.assertEqual(without, ("privateuseone:1", [2.0]))

    @unittest.skipUnless(STAND_IN, "TORCHSPAN_STAND_IN is not set")
    def test_without_a_map_they_arrive_on_the_cpu(self):
        def body(rank, size):
            tensor = torch.tensor([3.0]).to("privateuseone:0")
            return rpc.rpc_sync(f"worker{1 - rank}", place_of, args=(tensor,))

        self.assertEqual(run(2, body, world=Native()), [("cpu", [3.0])] * 2)


if __name__ == "__main__":
    unittest.main()
