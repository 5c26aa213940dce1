// Section checkpoint: saving, loading and the pause of training, against plain writes and copies of the same bytes.
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include <torch/torch.h>

#include <torchspan/checkpoint.h>

#include "bench/harness.h"
#include "checkpoint/files/directory.h"
#include "checkpoint/state/folder_reader.h"

namespace {

using namespace torchspan;

constexpr std::int64_t kTensors = 64;
constexpr std::int64_t kFloats = std::int64_t{4} << 20;  // 16 MiB each: 1 GiB in all
constexpr std::size_t kBytes = static_cast<std::size_t>(kTensors * kFloats) * sizeof(float);

/// Writes the bytes of the tensors with one loop of write() and syncs the file.
void write_plainly(const std::string& path, const std::vector<at::Tensor>& tensors) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  for (const at::Tensor& tensor : tensors) {
    const auto* data = static_cast<const char*>(tensor.data_ptr());
    for (std::size_t at = 0; at < tensor.nbytes();) {
      const ssize_t done = ::write(fd, data + at, tensor.nbytes() - at);
      if (done <= 0) throw std::runtime_error("cannot write " + path);
      at += static_cast<std::size_t>(done);
    }
  }
  if (::fsync(fd) != 0) throw std::runtime_error("cannot sync " + path);
  ::close(fd);
}

/// A folder on the disk under test: TORCHSPAN_BENCH_DIR, or the system's temporary folder.
std::string make_folder() {
  const char* given = std::getenv("TORCHSPAN_BENCH_DIR");
  std::string path =
      (given != nullptr ? std::filesystem::path(given) : std::filesystem::temp_directory_path()) /
      "torchspan-bench-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("cannot create " + path);
  return path;
}

/// Adds the pause alone: waiting for the write is no part of it.
void add_stall(nlohmann::json& metrics, Executor& executor, CheckpointManager& manager) {
  std::vector<double> stalls;
  for (int round = 0; round <= bench::rounds_or(5); ++round) {
    manager.wait();
    const TimePoint begin = executor.now();
    manager.save(round);
    const double took = std::chrono::duration<double, std::micro>(executor.now() - begin).count();
    if (round > 0) stalls.push_back(took);  // the first one allocates the buffer
  }
  manager.wait();
  double copy = 0;
  for (const auto& metric : metrics) {
    if (metric["name"] == "checkpoint/limit/memcpy/1GiB") copy = metric["value"];
  }
  const double stall = bench::percentile(stalls, 0.5);
  metrics.push_back({{"name", "checkpoint/stall/1GiB/memcpy"},
                     {"unit", "us"},
                     {"value", stall},
                     {"p99", bench::percentile(stalls, 0.99)},
                     {"peer", "checkpoint/limit/memcpy/1GiB"},
                     {"peer_value", copy},
                     {"ratio", stall / copy}});
}

void measure(const std::string& folder) {
  torch::nn::ParameterDict model;
  std::vector<at::Tensor> tensors, targets;
  for (std::int64_t i = 0; i < kTensors; ++i) {
    tensors.push_back(torch::randn({kFloats}));
    model->insert("t" + std::to_string(100 + i), tensors.back());
    targets.push_back(torch::zeros({kFloats}));
  }
  const auto executor = make_executor();
  CheckpointManager saving(
      {.directory = folder + "/save", .keep_last = 1, .asynchronous = false, .rng = false});
  saving.add("model", model);
  CheckpointManager stalling({.directory = folder + "/stall", .keep_last = 1, .rng = false});
  stalling.add("model", model);
  std::int64_t step = 0;
  saving.save(++step);
  const checkpoint::Disk disk;
  const checkpoint::Directory directory(disk, folder + "/save");

  bench::Bench bench(*executor);
  bench.add("checkpoint/limit/write/1GiB", 1, [&] { write_plainly(folder + "/plain", tensors); });
  bench.add("checkpoint/save/1GiB/write", 1, [&] { saving.save(++step); },
            {.peer = "checkpoint/limit/write/1GiB"});
  bench.add("checkpoint/limit/memcpy/1GiB", 2, [&] {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      std::memcpy(targets[i].data_ptr(), tensors[i].data_ptr(), tensors[i].nbytes());
  });
  bench.add("checkpoint/load/1GiB/memcpy", 2,
            [&] {
              const std::string newest = directory.path_of(directory.committed().front().name);
              const checkpoint::FolderReader reader(newest, checkpoint::open_manifest(disk, newest));
              for (std::size_t i = 0; i < targets.size(); ++i)
                reader.read_into("model.t" + std::to_string(100 + i), targets[i]);
            },
            {.peer = "checkpoint/limit/memcpy/1GiB"});
  bench.add("checkpoint/verify/1GiB/memcpy", 2,
            [&] {
              const std::string newest = directory.path_of(directory.committed().front().name);
              checkpoint::verify_data(disk, newest, checkpoint::open_manifest(disk, newest));
            },
            {.peer = "checkpoint/limit/memcpy/1GiB"});
  bench.run(bench::rounds_or(5));
  auto metrics = bench.metrics();
  add_stall(metrics, *executor, stalling);
  bench::print_section(metrics);
}

}  // namespace

int main() {
  static_assert(kBytes == std::size_t{1} << 30);
  const std::string folder = make_folder();
  int code = 0;
  try {
    measure(folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_checkpoint: %s\n", error.what());
    code = 1;
  }
  std::filesystem::remove_all(folder);
  return code;
}
