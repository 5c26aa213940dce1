#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace fashion_mnist {

inline constexpr const char* kDefaultFolder = "/usr/share/datasets/fashion-mnist";
inline constexpr std::int64_t kSide = 28;
inline constexpr std::int64_t kClasses = 10;

/// The input of one training step.
struct Batch {
  at::Tensor images;  ///< [n, 1, 28, 28], float, the training set's mean 0 and standard deviation 1
  at::Tensor labels;  ///< [n], int64
  std::int64_t size() const { return labels.size(0); }
};

/// Labeled images as bytes in the memory of one device; batches are made on demand, on that device.
struct Dataset {
  at::Tensor images;  ///< [n, 28, 28], uint8
  at::Tensor labels;  ///< [n], int64, 0 to 9

  std::int64_t size() const { return labels.size(0); }
  /// Returns the images at those positions (int64), normalized.
  Batch batch(const at::Tensor& positions) const;
  /// The same, for a torchspan::DataLoader.
  Batch get_batch(const std::vector<std::int64_t>& positions) const;
  /// Returns the first `count` images, or all if there are fewer.
  Dataset first(std::int64_t count) const;
  Dataset to(c10::Device device) const { return {images.to(device), labels.to(device)}; }
};

enum class Split { kTrain, kTest };

/// Reads the two files of a split, for instance train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz,
/// gzipped or not. Throws torchspan::Error with the file, the expected content and a remedy.
Dataset load(const std::string& folder, Split split);

/// Returns the positions 0 … count - 1 in batches of `batch` (the last may be smaller), in order.
std::vector<at::Tensor> batches_in_order(std::int64_t count, std::int64_t batch);
/// The same, shuffled; equal seeds give equal orders, whatever other random numbers the process draws.
std::vector<at::Tensor> shuffled_batches(std::int64_t count, std::int64_t batch, std::uint64_t seed);

}  // namespace fashion_mnist
