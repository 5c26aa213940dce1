"""Mistakes that users make with tokens: the compiler says in a sentence what is wrong."""
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from compiling import LIBTORCH_FRONT_END, Flags  # noqa: E402

COMMON = """
#include <torch/nn/modules/container/sequential.h>
#include <torchspan/rpc/remote_module.h>
namespace ts = torchspan;
struct TowerImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x);
};
TORCH_MODULE(Tower);
inline constexpr ts::ModuleClass<Tower> kTower{"Tower"};
int add(int a, int b);
inline constexpr ts::Function<add> kAdd{"add"};
"""
MISTAKES = {
    "void too_many(ts::RemoteModule<Tower>& tower, at::Tensor x) { tower.forward(x, 3); }":
        "the module's forward() takes another number of arguments",
    "void too_few(ts::RemoteModule<Tower>& tower) { (void)tower.forward_async(); }":
        "the module's forward() takes another number of arguments",
    "inline constexpr ts::Function<[](auto x) { return x; }> kSame{\"same\"};":
        "a Function names a function, a member function, or a lambda without captures",
    "inline constexpr ts::ModuleClass<torch::nn::Sequential> kStack{\"stack\"};\n"
    "void add_to(ts::FunctionTable& functions) { functions.add(kStack); }":
        "a ModuleClass needs a module with one forward()",
    "void wrong_call(ts::Worker& worker) { worker.rpc_sync(\"worker1\", kAdd, 1); }":
        "these arguments do not fit the function that the token names",
}


def compiler():
    """The build's, with its precompiled header of LibTorch's front end; without a build g++."""
    flags = Flags(ROOT)
    header = flags.precompiled.get("torchspan_torch_whole_programs")
    if header and not header.build():
        return [header.compiler, *header.flags, "-Iinclude"]
    return ["g++", *flags.of("none.cpp", True)]


@unittest.skipUnless(LIBTORCH_FRONT_END.is_dir(), "needs LibTorch where Debian has it")
class CompileErrors(unittest.TestCase):
    def test_each_mistake_has_its_message(self):
        done = subprocess.run([*compiler(), "-fsyntax-only", "-x", "c++", "-"], cwd=ROOT, input=COMMON + "\n".join(MISTAKES) + "\n", capture_output=True, text=True,
                              check=False)
        errors = [line for line in done.stderr.splitlines() if "static assertion failed" in line]
        self.assertEqual(sorted(MISTAKES.values()), sorted(
            next((sentence for sentence in MISTAKES.values() if sentence in error), error) for error in errors), done.stderr)


if __name__ == "__main__":
    unittest.main()
