"""The Conan recipe: it exports what the project installs."""
import ast
import fnmatch
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def exported():
    """The recipe's SOURCES; Conan itself need not be installed."""
    recipe = ast.parse((ROOT / "packaging" / "conan" / "conanfile.py").read_text())
    for node in recipe.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "SOURCES":
            return ast.literal_eval(node.value)
    raise AssertionError("no SOURCES in the recipe")


class ConanRecipe(unittest.TestCase):
    def test_exports_what_is_installed(self):
        rules = (ROOT / "cmake" / "TorchspanInstall.cmake").read_text()
        installed = re.findall(r"\$\{PROJECT_SOURCE_DIR\}/([\w./-]+)", rules)
        self.assertIn("LICENSE", installed)
        for path in installed:
            with self.subTest(path=path):
                name = path if (ROOT / path).is_file() else path + "/"
                self.assertTrue(any(fnmatch.fnmatch(name, pattern) for pattern in exported()), path)


if __name__ == "__main__":
    unittest.main()
