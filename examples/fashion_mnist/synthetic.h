#pragma once
// Small IDX files for tests.
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>
#include <zlib.h>

namespace fashion_mnist::testing {

using Raw = std::vector<std::uint8_t>;

inline Raw idx_bytes(const std::vector<std::uint32_t>& sizes, const Raw& elements) {
  Raw raw = {0, 0, 8, static_cast<std::uint8_t>(sizes.size())};
  for (const std::uint32_t size : sizes) {
    for (int shift = 24; shift >= 0; shift -= 8) raw.push_back(static_cast<std::uint8_t>(size >> shift));
  }
  raw.insert(raw.end(), elements.begin(), elements.end());
  return raw;
}

inline void write_file(const std::string& path, const Raw& raw) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(raw.data()), static_cast<std::streamsize>(raw.size()));
}

inline Raw read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return Raw(std::istreambuf_iterator<char>(file), {});
}

inline void write_zipped(const std::string& path, const Raw& raw) {
  gzFile file = gzopen(path.c_str(), "wb");
  const int written = gzwrite(file, raw.data(), static_cast<unsigned>(raw.size()));
  if (gzclose(file) != Z_OK || written != static_cast<int>(raw.size()))
    throw std::runtime_error("no room for " + path);
}

/// Images with an obvious class: class c has a bright bar two rows high, c + 1 bars from the top.
inline void write_split(const std::string& folder, const std::string& prefix, std::uint32_t count) {
  Raw pixels(std::size_t{count} * 28 * 28, 0), labels(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    labels[i] = static_cast<std::uint8_t>(i % 10);
    const std::size_t bar = std::size_t{i} * 28 * 28 + (std::size_t{labels[i]} + 1) * 2 * 28;
    for (std::size_t pixel = 0; pixel < 2 * 28; ++pixel) {
      pixels[bar + pixel] = static_cast<std::uint8_t>(200 + (i + pixel) % 50);
    }
  }
  write_zipped(folder + "/" + prefix + "-images-idx3-ubyte.gz", idx_bytes({count, 28, 28}, pixels));
  write_zipped(folder + "/" + prefix + "-labels-idx1-ubyte.gz", idx_bytes({count}, labels));
}

inline void write_dataset(const std::string& folder, std::uint32_t train, std::uint32_t test) {
  write_split(folder, "train", train);
  write_split(folder, "t10k", test);
}

}  // namespace fashion_mnist::testing
