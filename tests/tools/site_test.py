"""Builds small sites and pages, and sees tools/build-docs and its check of links report what leads nowhere."""
import importlib.machinery
import importlib.util
import json
import sys
import tempfile
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"
sys.path.insert(0, str(TOOLS))
from site_links import broken_links  # noqa: E402


def load_build_docs(root):
    """The program as a module that works in `root`."""
    loader = importlib.machinery.SourceFileLoader("build_docs", str(TOOLS / "build-docs"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("build_docs", loader))
    loader.exec_module(module)
    module.ROOT, module.SITES = root, root / "build" / "docs" / "site"
    return module


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)


class Links(Folder):
    def test_links_with_targets_are_accepted(self):
        self.write("index.html", '<h1 id="top">a</h1><a href="guide/calls.html#end%20of">b</a><a href="#top">c</a><a href="#">d</a>'
                   '<a href="https://example.org/x">e</a><a href="mailto:a@b">f</a><a href="guide">g</a><img src="p.svg">')
        self.write("guide/calls.html", '<a name="end of"></a><a href="../index.html">x</a>')
        self.write("guide/index.html", "")
        self.write("p.svg", "<svg/>")
        self.assertEqual(broken_links(self.root), [])

    def test_missing_pages_pictures_and_anchors_are_named(self):
        self.write("index.html", '<a href="gone.html">a</a><img src="gone.svg"><a href="#nothing">b</a><a href="calls.html#old">c</a>')
        self.write("calls.html", '<h2 id="new">x</h2>')
        self.assertEqual(broken_links(self.root), [
            "index.html: 'gone.html' leads nowhere", "index.html: 'gone.svg' leads nowhere",
            "index.html: '#nothing': index.html has no '#nothing'", "index.html: 'calls.html#old': calls.html has no '#old'"])

    def test_folders_that_are_left_out_are_targets_only(self):
        self.write("index.html", '<a href="api/index.html#x">a</a>')
        self.write("api/index.html", '<a href="gone.html">a</a>')
        self.assertEqual(broken_links(self.root, leave_out=("api",)), ["index.html: 'api/index.html#x': api/index.html has no '#x'"])


class Pages(Folder):
    def rewritten(self, text):
        build = load_build_docs(self.root)
        problems = []
        pages = {"docs/calls.md": "calls.md", "README.md": "index.md", "src/net/README.md": "rooms/net.md"}
        for name in pages:
            self.write(name, "")
        self.write("src/net/ring.h", "")
        return build.rewritten("docs/calls.md", text, pages, problems), problems

    def test_links_lead_to_pages_of_the_site_and_source_code_becomes_text(self):
        text, problems = self.rewritten("[a](../README.md#top) [b](../src/net) [c](../src/net/ring.h) [d](gone.md)")
        self.assertEqual(text, "[a](index.md#top) [b](rooms/net.md) c (`src/net/ring.h`) d")
        self.assertEqual(problems, ["docs/calls.md: there is no 'gone.md'"])

    def test_data_becomes_a_generated_page_to_which_links_lead(self):
        build = load_build_docs(self.root)
        self.write("tests/peers.txt", "# Tests of peers\n")
        self.write("docs/calls.md", "")
        self.write("tools/conformance-table", "#!/bin/sh\necho generated\n")
        (self.root / "tools/conformance-table").chmod(0o755)
        self.write("docs/images/a.svg", "")
        build.PAGES = self.root / "build" / "docs" / "pages"
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
            self.write(name, "[conformance](tests/peers.txt)\n")
        pages = build.copy_pages()
        self.assertEqual(pages["tests/peers.txt"], "conformance.md")
        self.assertNotIn("bench/recorded.json", pages)
        self.assertEqual((build.PAGES / "conformance.md").read_text(), "generated\n")
        self.assertEqual((build.PAGES / "index.md").read_text(), "[conformance](conformance.md)\n")

    def test_marks_of_blocks_are_removed_and_code_stays(self):
        text, _ = self.rewritten("```sh run any\n[a](gone.md)\n```\n```cpp declarations\nint a;\n```\n```cpp\nint b;\n```\n```\nc d\n```\n")
        self.assertEqual(text, "```sh\n[a](gone.md)\n```\n```cpp\nint a;\n```\n```cpp\nint b;\n```\n```\nc d\n```\n")


class Versions(Folder):
    def test_the_menu_lists_all_versions_and_the_start_leads_to_the_newest(self):
        build = load_build_docs(self.root)
        for name in ("0.9", "0.10", "0.2", "drafts"):
            self.write(f"build/docs/site/{name}/index.html", "")
        build.write_versions()
        listed = json.loads((build.SITES / "versions.json").read_text())
        self.assertEqual([entry["version"] for entry in listed], ["0.10", "0.9", "0.2"])
        self.assertEqual([entry["aliases"] for entry in listed], [["latest"], [], []])
        self.assertIn("url=0.10/index.html", (build.SITES / "index.html").read_text())

    def test_the_version_is_that_of_the_project(self):
        self.write("CMakeLists.txt", "project(torchspan VERSION 1.12.3 LANGUAGES CXX)\n")
        self.assertEqual(load_build_docs(self.root).version(), "1.12")


if __name__ == "__main__":
    unittest.main()
