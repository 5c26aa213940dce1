"""cmake/export_list.py: which compiled names libtorchspan.so exports, for small headers and libraries."""
import functools
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = """
#include <memory>
#define TORCHSPAN_CAPABILITY(name) __attribute__((capability(name)))
namespace torchspan {
// class Commented { };
const char* const kText = "class Quoted {";
enum class Kind { kOne };
class [[nodiscard]] Worker {
 public:
  Worker();
  virtual ~Worker();
  void run() const;
  struct Options { Options(); int threads = 1; };
 private:
  friend void befriended(Worker&);
  class Impl;
  std::unique_ptr<Impl> impl_;
};
template <class T, class = void> struct Holder { T get() const; };
template <class T, class U> T Holder<T, U>::get() const { return T(); }
template <class T>
requires (sizeof(T) > 0)
T twice(T value) { return value + value; }
namespace detail { void helper(Kind kind = Kind{}); }
bool operator==(const Worker& a, const Worker& b);
extern int counter;
class Announced;
}  // namespace torchspan
"""
SOURCE = """
#include "public.h"
namespace torchspan {
class Worker::Impl { public: void step(); };
void Worker::Impl::step() {}
Worker::Worker() : impl_(std::make_unique<Impl>()) { impl_->step(); }
Worker::~Worker() = default;
void Worker::run() const {}
Worker::Options::Options() {}
class Announced { public: void hidden(); };
void Announced::hidden() {}
class Private { public: void hidden(); };
void Private::hidden() {}
struct Element { int operator+(int) const; };
void befriended(Worker&) {}
void detail::helper(Kind) {}
bool operator==(const Worker&, const Worker&) { return true; }
int counter = 0;
int private_function(const Worker&) { return 0; }
template struct Holder<int>;
template struct Holder<Private*>;
inline int& shared() { static int value = 0; return value; }
}  // namespace torchspan
namespace other { inline int& shared() { static int value = 0; return value; } }
int* use() { return &other::shared(); }
"""


@functools.cache
def exported(header=HEADER, source=SOURCE):
    """The demangled exports of a library that is linked with the list."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "include").mkdir()
        (root / "include" / "public.h").write_text(header)
        (root / "library.cpp").write_text(source)
        map_file, archive, library = (root / name for name in ("list.map", "library.a", "library.so"))
        def run(*command):
            return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
        run("c++", "-std=c++20", "-fPIC", "-Iinclude", "-c", "library.cpp", "-o", "library.o")
        run("ar", "rcs", archive, "library.o")
        run(ROOT / "cmake/export_list.py", root / "include", "nm", map_file, archive)
        run("c++", "-shared", "library.o", f"-Wl,--version-script={map_file}", "-o", library)
        lines = run("nm", "-D", "-C", "--defined-only", library).splitlines()
        return {re.sub(r"\(.*", "", line.split(" ", 2)[2]) for line in lines}


class ExportList(unittest.TestCase):
    def test_exports_what_headers_declare(self):
        self.assertLessEqual({"torchspan::Worker::Worker", "torchspan::Worker::~Worker", "torchspan::Worker::run",
                              "torchspan::Worker::Options::Options", "torchspan::detail::helper", "torchspan::operator==",
                              "torchspan::counter", "typeinfo for torchspan::Worker", "vtable for torchspan::Worker",
                              "torchspan::Holder<int, void>::get"}, exported())

    def test_hides_the_rest(self):
        hidden = ("Impl", "Announced", "Private", "befriended", "private_function", "use")
        self.assertEqual([name for name in exported() if any(word in name for word in hidden)], [])

    def test_exports_statics_of_inline_functions_of_other_libraries(self):
        self.assertIn("other::shared", exported())

    def test_an_unclosed_header_is_an_error_that_names_it(self):
        with self.assertRaises(subprocess.CalledProcessError) as caught:
            exported("namespace torchspan { class Open {", "int x;")
        self.assertIn("public.h: '{' is not closed", caught.exception.stderr)

    def test_a_library_without_public_names_is_an_error(self):
        with self.assertRaises(subprocess.CalledProcessError) as caught:
            exported("namespace torchspan { class Other {}; }", "int x;")
        self.assertIn("no library defines anything", caught.exception.stderr)


if __name__ == "__main__":
    unittest.main()
