#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fashion_mnist {

/// An array of unsigned bytes as an IDX file holds it, first dimension slowest.
struct IdxArray {
  std::vector<std::int64_t> sizes;
  std::vector<std::uint8_t> bytes;
};

/// Reads an IDX file, gzipped or not, that must hold `dimensions` dimensions. Throws torchspan::Error that
/// names the file, what was expected and what to do: for a file that is missing, damaged, no IDX file of
/// unsigned bytes, or longer or shorter than its header says. A header is never believed before the bytes are
/// there. Format: http://yann.lecun.com/exdb/mnist.
IdxArray read_idx(const std::string& path, std::size_t dimensions);

}  // namespace fashion_mnist
