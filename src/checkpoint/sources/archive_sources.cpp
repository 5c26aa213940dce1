#include <algorithm>
#include <fmt/format.h>
#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <torchspan/checkpoint/sources.h>
#include <torchspan/core/error.h>

#include "checkpoint/files/checksum.h"
#include "checkpoint/state/torch_types.h"
#include "state/api/save_load.h"

namespace torchspan::checkpoint {
namespace {

/// An object that LibTorch's archives serialize, as one tensor of bytes.
class ArchiveSource final : public StateSource {
 public:
  ArchiveSource(std::function<void(torch::serialize::OutputArchive&)> save,
                std::function<void(torch::serialize::InputArchive&)> load,
                std::function<std::uint64_t()> fingerprint = {})
      : save_(std::move(save)), load_(std::move(load)), fingerprint_(std::move(fingerprint)) {}

  void save(StateWriter& writer) const override {
    torch::serialize::OutputArchive archive;
    save_(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    const std::string text = std::move(stream).str();
    const at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
    std::copy(text.begin(), text.end(), bytes.data_ptr<std::uint8_t>());
    writer.add("archive", bytes, fingerprint_ ? fingerprint_() : 0);
  }
  void load(const StateReader& reader) override {
    const at::Tensor bytes = reader.read("archive").contiguous();
    std::istringstream stream(
        std::string(static_cast<const char*>(bytes.data_ptr()), static_cast<std::size_t>(bytes.numel())));
    torch::serialize::InputArchive archive;
    archive.load_from(stream);
    load_(archive);
  }

 private:
  const std::function<void(torch::serialize::OutputArchive&)> save_;
  const std::function<void(torch::serialize::InputArchive&)> load_;
  const std::function<std::uint64_t()> fingerprint_;
};

/// Differs between optimizers of different parameters, whose archives have no names: the first elements of each
/// parameter.
std::uint64_t fingerprint_of(const torch::optim::Optimizer& optimizer) {
  Checksum checksum;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.defined() || parameter.numel() == 0) continue;
      const at::Tensor some = parameter.detach().flatten().slice(0, 0, 32).cpu().contiguous();
      checksum.add(bytes_of(some));
    }
  }
  return checksum.finish() | 1;
}

/// An optimizer's archive, and its learning rates: LibTorch's load() leaves those unchanged.
class TorchOptimizerSource final : public StateSource {
 public:
  explicit TorchOptimizerSource(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer),
        archive_([&optimizer](torch::serialize::OutputArchive& archive) { optimizer.save(archive); },
                 [&optimizer](torch::serialize::InputArchive& archive) {
                   state::load_exactly(optimizer, archive);
                 },
                 [&optimizer] { return fingerprint_of(optimizer); }) {}

  void save(StateWriter& writer) const override {
    archive_.save(writer);
    for (std::size_t i = 0; i < optimizer_.param_groups().size(); ++i) {
      if (const auto rate = rate_of(optimizer_.param_groups()[i])) writer.add_value(name(i), *rate);
    }
  }
  void load(const StateReader& reader) override {
    archive_.load(reader);
    for (std::size_t i = 0; i < optimizer_.param_groups().size(); ++i) {
      torch::optim::OptimizerParamGroup& group = optimizer_.param_groups()[i];
      if (rate_of(group)) group.options().set_lr(detail::value_as<double>(reader.value(name(i))));
    }
  }

 private:
  static std::string name(std::size_t group) { return fmt::format("lr.{}", group); }
  /// nullopt if the options of a user's optimizer have no rate.
  static std::optional<double> rate_of(const torch::optim::OptimizerParamGroup& group) {
    if (!group.has_options()) return std::nullopt;
    try {
      return group.options().get_lr();
    } catch (const c10::Error&) {
      return std::nullopt;
    }
  }

  torch::optim::Optimizer& optimizer_;
  ArchiveSource archive_;
};

/// Reaches the protected step count of a schedule.
struct StepCount : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& schedule) { return schedule.*(&StepCount::step_count_); }
};

}  // namespace

SourcePtr torch_optimizer_source(torch::optim::Optimizer& optimizer) {
  return std::make_unique<TorchOptimizerSource>(optimizer);
}

SourcePtr torch_schedule_source(torch::optim::LRScheduler& schedule) {
  return value_source([&schedule] { return Value(static_cast<std::int64_t>(StepCount::of(schedule))); },
                      [&schedule](const Value& value) {
                        const auto steps = detail::value_as<std::int64_t>(value);
                        if (steps < 0 || steps > std::numeric_limits<unsigned>::max())
                          throw_invalid(fmt::format("{} is not a number of steps", steps));
                        StepCount::of(schedule) = static_cast<unsigned>(steps);
                      });
}

SourcePtr archive_source(std::function<void(torch::serialize::OutputArchive&)> save,
                         std::function<void(torch::serialize::InputArchive&)> load) {
  return std::make_unique<ArchiveSource>(std::move(save), std::move(load));
}

}  // namespace torchspan::checkpoint
