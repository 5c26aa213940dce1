"""The workflow and the devcontainer: their commands exist, and they are those of .ci/run, the Makefile and the presets."""
import json
import re
import subprocess
import unittest
from pathlib import Path

try:
    import yaml  # in the packages of `make check`
except ImportError:
    yaml = None

ROOT = Path(__file__).resolve().parents[2]
PREPARE = "apt-get update && apt-get install -y --no-install-recommends ca-certificates git make"


def text_of(path):
    return (ROOT / path).read_text()


def make_targets():
    return set(re.search(r"^\.PHONY: (.*)$", text_of("Makefile"), re.MULTILINE).group(1).split())


def presets(kind):
    return {preset["name"] for preset in json.loads(text_of("CMakePresets.json"))[f"{kind}Presets"]}


def groups():
    return set(re.findall(r"^  (\w[\w-]*)   ", subprocess.run([ROOT / "tools/install-deps", "--help"], check=True, text=True,
                                                            capture_output=True).stdout, re.MULTILINE))


class Commands(unittest.TestCase):
    def check(self, command):
        """A command of the repository: its program, target, preset or group exists."""
        words = command.split()
        if words[0] == "sudo":
            words = words[1:]
        if words[0] == "make":
            self.assertIn(words[1], make_targets(), command)
        elif words[0] in ("cmake", "ctest"):
            kind = "test" if words[0] == "ctest" else "build" if "--build" in words else "configure"
            self.assertIn(words[words.index("--preset") + 1], presets(kind), command)
        elif words[0].startswith(("tools/", ".ci/")):
            self.assertTrue((ROOT / words[0]).stat().st_mode & 0o100, command)
            if words[0] == "tools/install-deps":
                self.assertLessEqual(set(words[1:]), groups(), command)
            if words[0] == "tools/test-packages":
                self.assertIn(words[1], ("bookworm", "trixie"), command)
        else:
            self.assertIn(words[0], ("apt-get", "git"), command)


class Workflow(Commands):
    def setUp(self):
        if yaml is None:
            self.skipTest("python3-yaml is not installed (tools/install-deps check)")
        self.jobs = yaml.safe_load(text_of(".github/workflows/ci.yml"))["jobs"]

    def commands(self, job):
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            for command in step.get("run", "").split(" && "):
                key = re.search(r"\$\{\{ matrix\.(\w+) \}\}", command)
                for value in matrix[key.group(1)] if key else [""]:
                    yield command.replace(key.group(), value) if key else command

    def test_every_command_exists(self):
        for name, job in self.jobs.items():
            commands = [command for command in self.commands(job) if command]
            self.assertTrue(commands, name)
            for command in commands:
                with self.subTest(job=name, command=command):
                    self.check(command)

    def test_a_wrong_command_is_found(self):
        for command in ("make tests", "cmake --preset none", "tools/none", "tools/install-deps none", "curl x"):
            with self.subTest(command=command), self.assertRaises((AssertionError, FileNotFoundError)):
                self.check(command)

    def test_the_first_job_is_that_of_submissions(self):
        self.assertEqual(list(self.commands(self.jobs["debian12"]))[-1], ".ci/run")

    def test_every_release_of_libtorch_is_tested(self):
        images = {job["container"]["image"] for job in self.jobs.values() if "container" in job}
        self.assertEqual(images, {"debian:12", "debian:13"})
        pip = re.search(r"^torch2_version=\$\{TORCH2_VERSION:-(\d+\.\d+)", text_of("tools/install-deps"), re.MULTILINE)
        self.assertIn(f"pip has {pip.group(1)}.", text_of(".github/workflows/ci.yml"))
        self.assertIn("tools/install-deps build torch2", list(self.commands(self.jobs["torch2"])))

    def test_containers_are_prepared_alike(self):
        for name, job in self.jobs.items():
            if "container" in job:
                with self.subTest(job=name):
                    self.assertTrue(job["steps"][0]["run"].startswith(PREPARE))
                    self.assertEqual(job["container"]["options"], "--privileged --shm-size=2g")
                    self.assertIn('git config --global --add safe.directory "$GITHUB_WORKSPACE"', self.commands(job))


class OtherEnvironments(Commands):
    def test_the_devcontainer_is_the_workflows_container(self):
        container = json.loads(text_of(".devcontainer/devcontainer.json"))
        self.assertEqual(container["image"], "debian:12")
        self.assertEqual(container["runArgs"], ["--privileged", "--shm-size=2g"])
        self.assertTrue(container["onCreateCommand"].startswith(PREPARE + " && "))
        for command in container["onCreateCommand"].split(" && ") + [container["postStartCommand"]]:
            self.check(command)

    def test_ci_run_makes_what_contributing_asks_for(self):
        made = re.findall(r"^make (\w+)", text_of(".ci/run"), re.MULTILINE)
        self.assertEqual(made, ["test", "demo", "check"])
        for target in made:
            self.check(f"make {target}")


if __name__ == "__main__":
    unittest.main()
