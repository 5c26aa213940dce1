"""Runs the tests of the Python package: ours, then PyTorch's own suites from its wheel.

    build/python/venv/bin/python tests/python/run.py [name...]

Names are those of files without .py, or "suites". Prints what fails and one line for each part.
"""

import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
SUITES = [
    ["torch_c10d_suite.py"],
    ["torch_c10d_suite.py", "--as", "gloo"],
    ["torch_c10d_suite.py", "--as", "gloo", "--world-size", "4"],
    ["torch_rpc_suite.py"],
    ["torch_rpc_suite.py", "--tensorpipe"],
    ["torch_rpc_suite.py", "--installed"],
]


def main():
    parts = [[path.name] for path in sorted(HERE.glob("*_test.py"))] + SUITES
    names = sys.argv[1:]
    if names:
        parts = [part for part in parts if part[0][: -len(".py")] in names or ("suites" in names and part in SUITES)]
    failed = []
    for part in parts:
        started = time.monotonic()
        result = subprocess.run(
            [sys.executable, str(HERE / part[0]), *part[1:]],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
        )
        good = result.returncode == 0
        output = (result.stdout if part in SUITES else result.stderr).strip().splitlines()
        shown = output[-1:] if good and part in SUITES else [] if good else output[-60:]
        for line in shown:
            print("   ", line)
        print(f"{'passed' if good else 'FAILED'} {' '.join(part)} ({time.monotonic() - started:.0f} s)", flush=True)
        failed += [] if good else [part]
    print(f"{len(parts) - len(failed)} passed, {len(failed)} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
