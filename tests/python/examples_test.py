"""The examples in examples/python, as their first lines start them: by torchrun, and by `torchspan run`."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).parent.parent.parent
LIMIT = 300  # seconds; processes import torch for a minute on a busy machine

# `torchspan run`, from the environment, the build folder or PATH.
COMMAND = next(
    (
        str(path)
        for path in (os.environ.get("TORCHSPAN_COMMAND"), ROOT / "build/dev/bin/torchspan", shutil.which("torchspan"))
        if path and os.access(path, os.X_OK)
    ),
    None,
)


def launchers(ranks):
    yield [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    if COMMAND:
        yield [COMMAND, "run", "-n", str(ranks), sys.executable]


def output_of(launcher, example, *options):
    done = subprocess.run(
        [*launcher, str(ROOT / "examples/python" / example), *options],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise AssertionError(f"{launcher}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


class Examples(unittest.TestCase):
    def test_ranks_learn_what_one_process_learns(self):
        for launcher in launchers(2):
            with self.subTest(launcher=launcher):
                found = re.search(r"2 ranks, 20 steps: loss ([0-9.]+); one process differs by (\S+)", output_of(launcher, "ddp.py", "--steps", "20"))
                self.assertLess(float(found[2]), 1e-5)

    def test_all_trainers_of_a_parameter_server_learn(self):
        for launcher in launchers(3):
            with self.subTest(launcher=launcher):
                output = output_of(launcher, "parameter_server.py", "--steps", "20")
                losses = re.findall(r"trainer [12]: loss ([0-9.]+) before, ([0-9.]+) after", output)
                self.assertEqual(len(losses), 2, output)
                for first, last in losses:
                    self.assertLess(float(last), 0.8 * float(first))

    def test_an_agent_learns_from_observers_one_by_one_and_in_batches(self):
        for launcher in launchers(3):
            for options in ([], ["--batch"]):
                with self.subTest(launcher=launcher, options=options):
                    output = output_of(launcher, "reinforcement.py", "--episodes", "60", *options)
                    found = re.search(r"4 observers: reward (-[0-9.]+) in the first episodes, (-[0-9.]+) in the last", output)
                    self.assertIsNotNone(found, output)
                    self.assertLess(-float(found[2]), 0.7 * -float(found[1]))

    def test_an_rnn_on_two_workers_learns_what_one_process_learns(self):
        for launcher in launchers(2):
            with self.subTest(launcher=launcher):
                output = output_of(launcher, "rnn.py")
                found = re.search(r"60 steps: loss ([0-9.]+) to ([0-9.]+); one process differs by (\S+)", output)
                self.assertIsNotNone(found, output)
                self.assertLess(float(found[2]), 0.2 * float(found[1]))
                self.assertLess(float(found[3]), 1e-4)

    def test_trainers_with_a_common_embedding_learn_what_one_process_learns(self):
        for launcher in launchers(3):
            with self.subTest(launcher=launcher):
                output = output_of(launcher, "ddp_with_rpc.py")
                found = re.search(r"2 trainers, 100 steps: loss ([0-9.]+) to ([0-9.]+); one process differs by (\S+)", output)
                self.assertIsNotNone(found, output)
                self.assertLess(float(found[2]), 0.8 * float(found[1]))
                self.assertLess(float(found[3]), 1e-4)

    @unittest.skipUnless(COMMAND, "needs `torchspan run` and the examples of C++")
    def test_a_learner_uses_simulators_of_cpp(self):
        simulator = pathlib.Path(COMMAND).with_name("cart_pole_simulator")
        both = f'if [ $RANK = 0 ]; then exec {sys.executable} "$0" "$@"; else exec {simulator}; fi'
        output = output_of([COMMAND, "run", "-n", "3", "sh", "-c", both], "cart_pole.py")
        found = re.search(r"32 carts on 2 workers: episodes of ([0-9]+) steps at first, ([0-9]+) at last", output)
        self.assertIsNotNone(found, output)
        self.assertGreater(int(found[2]), 2 * int(found[1]))

    def test_a_gpt_on_several_workers_learns_what_one_process_learns(self):
        for launcher in launchers(2):
            with self.subTest(launcher=launcher):
                output = output_of(launcher, "pipeline.py", "--steps", "20")
                found = re.search(r"2 workers, 20 steps: loss ([0-9.]+) before, ([0-9.]+) after; one process differs by (\S+)", output)
                self.assertLess(float(found[2]), 0.8 * float(found[1]))
                self.assertLess(float(found[3]), 1e-9)


if __name__ == "__main__":
    unittest.main()
