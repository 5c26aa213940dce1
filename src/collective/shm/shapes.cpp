#include "collective/shm/shapes.h"

#include <fmt/format.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

namespace torchspan::collective::shm {
namespace {

constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;

[[noreturn]] void throw_malformed() {
  throw Error(ErrorKind::kInvalid, "a member of the group described an impossible tensor");
}

/// The bytes of a shape; throws if no machine has that many.
std::uint64_t bytes_of(at::IntArrayRef sizes, std::size_t item) {
  std::uint64_t bytes = item;
  for (const std::int64_t size : sizes) {
    if (size < 0 || static_cast<std::uint64_t>(size) > kMostBytes) throw_malformed();
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes) || bytes > kMostBytes) {
      throw_malformed();
    }
  }
  return bytes;
}

}  // namespace

void put_sizes(Call& call, at::IntArrayRef sizes) {
  if (sizes.size() > kMostDimensions) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("a tensor with {} dimensions; this backend supports at most {}: flatten it",
                            sizes.size(), kMostDimensions));
  }
  call.dimensions = static_cast<std::uint32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), call.sizes.begin());
}

std::vector<std::int64_t> get_sizes(const Call& call, std::size_t item) {
  if (call.dimensions > kMostDimensions) throw_malformed();
  std::vector<std::int64_t> sizes(call.sizes.begin(), call.sizes.begin() + call.dimensions);
  if (bytes_of(sizes, item) != call.bytes) throw_malformed();
  return sizes;
}

std::size_t checked_size(std::uint64_t bytes) {
  if (bytes > kMostBytes) throw_malformed();
  return static_cast<std::size_t>(bytes);
}

void write_shape(ByteWriter& writer, at::IntArrayRef sizes) {
  writer.put(static_cast<std::uint32_t>(sizes.size()));
  for (const std::int64_t size : sizes) writer.put(size);
}

PartOfRow read_part(BytesView shapes, std::size_t index, std::size_t count, std::size_t item) {
  ByteReader reader(shapes);
  PartOfRow wanted;
  std::uint64_t offset = 0;
  for (std::size_t part = 0; part < count; ++part) {
    std::vector<std::int64_t> sizes(reader.get_count(sizeof(std::int64_t)));
    for (std::int64_t& size : sizes) size = reader.get<std::int64_t>();
    const std::uint64_t bytes = bytes_of(sizes, item);
    if (part == index) wanted = {offset, std::move(sizes)};
    offset += bytes;
  }
  reader.expect_end();
  return wanted;
}

std::uint32_t SparseParts::sparse_dimensions(const std::vector<Call>& calls) {
  for (const Call& call : calls) {
    if (call.entries != 0) return call.sparse_dimensions;
  }
  return calls.at(0).sparse_dimensions;
}

void SparseParts::add(const Call& call, std::uint32_t sparse_dimensions, at::ScalarType dtype) {
  if (call.dimensions > kMostDimensions || sparse_dimensions > call.dimensions) throw_malformed();
  const auto entries = static_cast<std::int64_t>(checked_size(call.entries));
  std::vector<std::int64_t> shape{entries};
  shape.insert(shape.end(), call.sizes.begin() + sparse_dimensions, call.sizes.begin() + call.dimensions);
  const std::vector<std::int64_t> places{sparse_dimensions, entries};
  if (bytes_of(shape, c10::elementSize(dtype)) + bytes_of(places, sizeof(std::int64_t)) != call.bytes) {
    throw_malformed();
  }
  indices.push_back(at::empty(places, at::TensorOptions().dtype(at::kLong)));
  values.push_back(at::empty(shape, at::TensorOptions().dtype(dtype)));
}

at::Tensor SparseParts::sum(at::IntArrayRef sizes, int divisor) const {
  const at::NoGradGuard no_grad;
  at::Tensor sum = at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values, 0), sizes).coalesce();
  if (divisor != 1) sum.values().div_(divisor);
  return sum;
}

}  // namespace torchspan::collective::shm
