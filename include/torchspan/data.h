#pragma once
// The samples of each step for each rank, in an order that checkpoints keep: docs/data.md. Includes no torch/nn.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/owner_process.h>
#include <torchspan/state/source.h>

namespace torchspan {

/// How far a training run is in its data.
struct DataPosition {
  std::int64_t step = 0;   ///< steps made; a trainer that repeats steps counts those that are committed
  std::int64_t epoch = 0;  ///< complete epochs
  std::int64_t next = 0;   ///< samples of the current epoch that these steps have used
  friend bool operator==(const DataPosition&, const DataPosition&) = default;
};

/// One rank's part of one step.
struct DataStep {
  std::int64_t number = 0;  ///< steps before this one
  std::int64_t epoch = 0;
  int rank = 0;                       ///< among the ranks that share the samples
  int size = 1;                       ///< number of these ranks
  std::int64_t batch = 0;             ///< samples of all ranks in this step
  std::vector<std::int64_t> samples;  ///< indices into the data set; at least one
  /// The factor of the sum of the losses of `samples`, so that the average over ranks is the mean over the whole
  /// batch; 0 if this rank has no share of a small batch.
  double weight = 0;
  std::uint64_t seed = 0;  ///< different for each step and rank; for dropout and augmentation

  /// Splits `samples` into parts of at most `size`, in order. Run all but the last under no_sync().
  std::vector<std::vector<std::int64_t>> micro_batches(std::int64_t size) const;
};

struct DataLoaderOptions {
  /// Samples in each step; required. The last step of an epoch uses what is left.
  std::int64_t batch = 0;
  /// Whether `batch` counts the samples of each rank. False: those of all ranks together, so that training with another
  /// number of ranks has the same steps.
  bool batch_per_rank = false;
  int rank = -1;  ///< of this process among those that share the samples, such as Session::rank(); required
  int size = 0;   ///< number of these ranks, such as Session::world_size(); required
  bool shuffle = true;     ///< each epoch has another order; false: that of the data set
  bool drop_last = false;  ///< leaves out the last step of an epoch if it has fewer samples
  std::uint64_t seed = 0;  ///< of the orders; equal on all ranks
  /// Threads that read. With more than one, the function that reads is called by several threads at the same time. 0:
  /// next() reads.
  int threads = 1;
  int ahead = 2;  ///< steps that are read or being read while a step is in use

  /// Throws Error{kInvalid} that names the wrong field.
  void validate() const;
};

namespace data {

/// A DataLoader without the type of its data.
class Loading {
 public:
  using Read = std::function<std::shared_ptr<void>(const DataStep&)>;
  struct Loaded {
    DataStep step;
    bool ends_epoch = false;
    std::shared_ptr<void> data;
  };
  Loading(std::int64_t samples, Read read, const DataLoaderOptions& options);
  ~Loading();
  Loading(Loading&&) noexcept;

  Loaded next();
  const DataPosition& position() const;
  void move_to(const DataPosition& position);
  std::int64_t steps_per_epoch() const;
  state::SourcePtr state_source();

  class Impl;

 private:
  ProcessOwned<Impl> impl_;
};

/// What a data set of torch::data, or another class with get_batch(), returns for some samples.
template <class Dataset>
auto get_batch(Dataset& dataset, const std::vector<std::int64_t>& samples) {
  if constexpr (requires { dataset.get_batch(samples); }) {
    return dataset.get_batch(samples);
  } else {
    const std::vector<std::size_t> indices(samples.begin(), samples.end());
    return dataset.get_batch(c10::ArrayRef<std::size_t>(indices));
  }
}
template <class Dataset>
std::int64_t size_of(const Dataset& dataset) {
  const auto size = dataset.size();
  if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(size)>>) {
    return static_cast<std::int64_t>(size);
  } else {
    if (!size.has_value()) throw_invalid("a DataLoader needs a data set of known size: its size() is empty");
    return static_cast<std::int64_t>(*size);
  }
}
template <class Dataset>
using BatchOf =
    decltype(get_batch(std::declval<Dataset&>(), std::declval<const std::vector<std::int64_t>&>()));

}  // namespace data

/// One rank's part of one step, with its data.
template <class Data>
struct LoadedStep : DataStep {
  Data data;
  bool ends_epoch = false;  ///< whether it is the last one of its epoch
};

/// Reads the samples of this rank, step by step and epoch after epoch, while earlier steps are in use. A checkpoint keeps
/// its position (CheckpointManager::add()); any number of ranks continues there, and uses each sample of an epoch once. Not
/// thread-safe. A forked child may go on with its copy, which begins where the parent's was.
template <class Data>
class DataLoader {
 public:
  /// `read` returns the data of those samples, of `samples` ones, on the loader's threads. Throws Error{kInvalid} that
  /// names a wrong option.
  DataLoader(std::int64_t samples, std::function<Data(const std::vector<std::int64_t>&)> read,
             const DataLoaderOptions& options)
      : DataLoader(
            samples, [read = std::move(read)](const DataStep& step) { return read(step.samples); }, options) {
  }
  /// The same; `read` also sees the rest of the step, such as its seed for augmentation.
  DataLoader(std::int64_t samples, std::function<Data(const DataStep&)> read,
             const DataLoaderOptions& options)
      : loading_(
            samples,
            [read = std::move(read)](const DataStep& step) -> std::shared_ptr<void> {
              return std::make_shared<Data>(read(step));
            },
            options) {}
  /// Of a data set of torch::data, or any object with size() and get_batch(samples), which it keeps.
  template <class Dataset>
  requires requires(Dataset& dataset) { dataset.size(); }
  DataLoader(Dataset dataset, const DataLoaderOptions& options)
      : DataLoader(std::make_shared<Dataset>(std::move(dataset)), options, nullptr) {}

  /// Returns the next step; waits until it is read. Throws what reading it threw; the next call then reads it again.
  LoadedStep<Data> next() {
    data::Loading::Loaded loaded = loading_.next();
    return {std::move(loaded.step), std::move(*static_cast<Data*>(loaded.data.get())), loaded.ends_epoch};
  }
  /// That of the step which next() returns next.
  const DataPosition& position() const { return loading_.position(); }
  /// The next step will be the one at `position`, for example that of another loader.
  void move_to(const DataPosition& position) { loading_.move_to(position); }
  std::int64_t steps_per_epoch() const { return loading_.steps_per_epoch(); }
  /// Saves position and seed. Restoring throws Error{kInvalid} if the data set had another size.
  state::SourcePtr state_source() { return loading_.state_source(); }

 private:
  template <class Dataset>
  DataLoader(const std::shared_ptr<Dataset>& dataset, const DataLoaderOptions& options, std::nullptr_t)
      : DataLoader(
            data::size_of(*dataset),
            [dataset](const DataStep& step) -> Data { return data::get_batch(*dataset, step.samples); },
            options) {}

  data::Loading loading_;
};

template <class Dataset>
DataLoader(Dataset, const DataLoaderOptions&) -> DataLoader<data::BatchOf<Dataset>>;

struct RecordFileOptions {
  std::vector<std::int64_t> shape = {};  ///< of a record; empty: one element
  at::ScalarType dtype = at::kByte;      ///< of its elements, in the byte order of this machine
  std::int64_t header_bytes = 0;         ///< of each file, before its first record
  /// Elements between the starts of two records; 0: the elements of a record. Less: records overlap, as windows of a
  /// text do.
  std::int64_t stride = 0;
};

/// A data set of records of equal size that lie one behind the other in one or more files, such as images or tokens. The
/// files must not change. Thread-safe.
class RecordFiles {
 public:
  /// Opens the files. Throws Error{kInvalid} that names a file that cannot be read, has no record, or, without a stride,
  /// ends within one.
  explicit RecordFiles(const std::vector<std::string>& files, const RecordFileOptions& options = {});

  /// Number of records; those of the first file come first.
  std::int64_t size() const;
  /// Reads records into a tensor of shape [records, shape…]. Throws Error{kInvalid} that names the file.
  at::Tensor get_batch(const std::vector<std::int64_t>& records) const;

 private:
  class Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace torchspan
