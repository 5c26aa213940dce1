"""How tools/build-wheels joins wheels for several releases of torch."""
import csv
import io
import tempfile
import unittest
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools/build-wheels"
NAME = "torchspan-0.2.0-cp311-cp311-linux_x86_64.whl"


def load_tool():
    spec = spec_from_loader("build_wheels", SourceFileLoader("build_wheels", str(TOOL)))
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


class Join(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.join = load_tool().join

    def wheel(self, release, module=b"module", source=b"import torch\n", name=NAME):
        path = self.folder / f"{release}{len(list(self.folder.iterdir()))}" / name
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("torchspan/__init__.py", source)
            archive.writestr(f"torchspan/torch_{release}/_C.so", module)
            archive.writestr("torchspan-0.2.0.dist-info/RECORD", "of one wheel")
        return path

    def test_has_the_modules_of_all_and_a_record_of_every_file(self):
        joined = self.join([self.wheel("2_11"), self.wheel("2_15", b"another")], self.folder / "out",
                           {"libfmt-dev": b"MIT"})
        self.assertEqual(joined, self.folder / "out" / NAME)
        with zipfile.ZipFile(joined) as archive:
            self.assertEqual(archive.read("torchspan/torch_2_15/_C.so"), b"another")
            self.assertEqual(archive.read("torchspan-0.2.0.dist-info/licenses/libfmt-dev"), b"MIT")
            rows = list(csv.reader(io.StringIO(archive.read("torchspan-0.2.0.dist-info/RECORD").decode())))
            self.assertEqual(sorted(row[0] for row in rows), sorted(archive.namelist()))
            sizes = {row[0]: row[2] for row in rows}
        self.assertEqual(sizes["torchspan/torch_2_11/_C.so"], "6")
        self.assertEqual(sizes["torchspan-0.2.0.dist-info/RECORD"], "")

    def test_refuses_wheels_that_do_not_belong_together(self):
        first = self.wheel("2_11")
        for other, reason in (
            (self.wheel("2_15", source=b"import os\n"), "come from different sources"),
            (self.wheel("2_11", b"another"), "were built for the same torch"),
            (self.wheel("2_15", name=NAME.replace("311", "313")), "not of one version, Python"),
        ):
            with self.assertRaisesRegex(SystemExit, reason):
                self.join([first, other], self.folder / "out", {})


if __name__ == "__main__":
    unittest.main()
