#include "fashion_mnist/dataset.h"

#include <algorithm>
#include <filesystem>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <torchspan/core/error.h>

#include "fashion_mnist/idx.h"

namespace fashion_mnist {
namespace {

using torchspan::Error;
using torchspan::ErrorKind;

// Mean and standard deviation of the 60,000 training images, with pixels from 0 to 1.
constexpr double kMean = 0.2860, kDeviation = 0.3530;

/// Returns the path of the gzipped file, or of the unzipped one if only that exists.
std::string path_of(const std::string& folder, const std::string& name) {
  const std::string plain = folder + "/" + name, zipped = plain + ".gz";
  std::error_code ignored;
  return !std::filesystem::exists(zipped, ignored) && std::filesystem::exists(plain, ignored) ? plain
                                                                                              : zipped;
}

at::Tensor to_tensor(const IdxArray& array) {
  at::Tensor tensor = at::empty(array.sizes, at::kByte);
  std::copy(array.bytes.begin(), array.bytes.end(), tensor.data_ptr<std::uint8_t>());
  return tensor;
}

}  // namespace

Dataset load(const std::string& folder, Split split) {
  const std::string prefix = split == Split::kTrain ? "train" : "t10k";
  const std::string images_path = path_of(folder, prefix + "-images-idx3-ubyte");
  const std::string labels_path = path_of(folder, prefix + "-labels-idx1-ubyte");
  const Dataset dataset{to_tensor(read_idx(images_path, 3)),
                        to_tensor(read_idx(labels_path, 1)).to(at::kLong)};
  if (dataset.images.size(0) == 0) {
    throw Error(ErrorKind::kInvalid, fmt::format("{} contains no images", images_path));
  }
  if (dataset.images.size(1) != kSide || dataset.images.size(2) != kSide) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("{} holds images of {} x {} pixels; Fashion-MNIST has {} x {}", images_path,
                            dataset.images.size(1), dataset.images.size(2), kSide, kSide));
  }
  if (dataset.images.size(0) != dataset.labels.size(0)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("{} holds {} images and {} holds {} labels: take both from the same copy",
                            images_path, dataset.images.size(0), labels_path, dataset.labels.size(0)));
  }
  if (const auto largest = dataset.labels.max().item<std::int64_t>(); largest >= kClasses) {
    throw Error(ErrorKind::kInvalid, fmt::format("{} holds the label {}; Fashion-MNIST's go from 0 to {}",
                                                 labels_path, largest, kClasses - 1));
  }
  return dataset;
}

Batch Dataset::batch(const at::Tensor& positions) const {
  const at::Tensor chosen = positions.to(images.device());
  const at::Tensor pixels = images.index_select(0, chosen).unsqueeze(1).to(at::kFloat);
  return {pixels.div_(255).sub_(kMean).div_(kDeviation), labels.index_select(0, chosen)};
}

Batch Dataset::get_batch(const std::vector<std::int64_t>& positions) const {
  return batch(at::tensor(positions));
}

Dataset Dataset::first(std::int64_t count) const {
  const std::int64_t kept = std::min(count, size());
  return {images.slice(0, 0, kept), labels.slice(0, 0, kept)};
}

std::vector<at::Tensor> batches_in_order(std::int64_t count, std::int64_t batch) {
  return at::arange(count, at::kLong).split(batch);
}

std::vector<at::Tensor> shuffled_batches(std::int64_t count, std::int64_t batch, std::uint64_t seed) {
  return at::randperm(count, at::detail::createCPUGenerator(seed), at::kLong).split(batch);
}

}  // namespace fashion_mnist
