"""tools/sbom and docs/licenses.md: the list of what a program is linked with, and its comparison with the documents."""
import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@unittest.skipUnless(shutil.which("dpkg-query") and shutil.which("cc"), "needs Debian's package database and a compiler")
class Sbom(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.program = Path(folder.name) / "program"
        subprocess.run(["cc", "-x", "c", "-", "-o", self.program, "-Wl,--no-as-needed", "-lstdc++"],
                       input="int main(void) { return 0; }", text=True, check=True)

    def sbom(self, *arguments):
        return subprocess.run([ROOT / "tools/sbom", "0.1.0", *arguments], capture_output=True, text=True,
                              env={**os.environ, "SOURCE_DATE_EPOCH": "86400"})

    def test_lists_what_is_linked_with_versions_and_licenses(self):
        done = self.sbom(self.program, "--documented")
        self.assertEqual(done.returncode, 0, done.stderr)
        document = json.loads(done.stdout)
        self.assertEqual(document["spdxVersion"], "SPDX-2.3")
        self.assertEqual(document["creationInfo"]["created"], "1970-01-02T00:00:00Z")
        licenses = {package["name"]: package["licenseDeclared"] for package in document["packages"]}
        self.assertEqual(licenses["torchspan"], "Apache-2.0")
        self.assertEqual(licenses["libc6"], "LGPL-2.1-or-later")
        self.assertEqual(licenses["libstdc++6"], "GPL-3.0-or-later WITH GCC-exception-3.1")
        linked = {relation["relatedSpdxElement"] for relation in document["relationships"]
                  if relation["relationshipType"] == "DYNAMIC_LINK"}
        self.assertIn("SPDXRef-libstdc--6", linked)
        self.assertEqual(self.sbom(self.program, "--documented").stdout, done.stdout)

    def test_headers_that_are_compiled_in_are_part_of_the_product(self):
        gcc = subprocess.run(["cc", "-dumpversion"], capture_output=True, text=True, check=True).stdout.strip()
        document = json.loads(self.sbom(self.program, "--headers", f"libstdc++-{gcc}-dev").stdout)
        related = {relation["relatedSpdxElement"]: relation for relation in document["relationships"]}
        relation = related[f"SPDXRef-libstdc---{gcc}-dev"]
        self.assertEqual((relation["spdxElementId"], relation["relationshipType"]), ("SPDXRef-torchspan", "STATIC_LINK"))

    def test_a_package_that_the_documents_lack_is_named(self):
        done = self.sbom(self.program, "--headers", "make", "--documented")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("docs/licenses.md says 'nothing' about the source package 'make-dfsg'", done.stderr)

    def test_a_missing_program_is_an_error(self):
        done = self.sbom(self.program.parent / "none")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("build it first", done.stderr)


if __name__ == "__main__":
    unittest.main()
