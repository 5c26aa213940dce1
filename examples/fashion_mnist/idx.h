#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fashion_mnist {

/// The array of unsigned bytes in an IDX file, first dimension slowest.
struct IdxArray {
  std::vector<std::int64_t> sizes;
  std::vector<std::uint8_t> bytes;
};

/// Reads an IDX file with `dimensions` dimensions, gzipped or not. Throws torchspan::Error with the file, the
/// expected content and a remedy for a file that is missing, damaged, not an IDX file of unsigned bytes, or
/// longer or shorter than its header says. Memory is allocated for bytes that exist, not for those that the
/// header announces. Format: http://yann.lecun.com/exdb/mnist.
IdxArray read_idx(const std::string& path, std::size_t dimensions);

}  // namespace fashion_mnist
