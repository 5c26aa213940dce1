#include <algorithm>
#include <array>
#include <cmath>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <functional>
#include <map>
#include <unordered_map>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/sharded/zero_redundancy_optimizer.h>

#include "data_parallel/api/agreement.h"
#include "sharded/state/flat_ranges.h"
#include "sharded/state/gradient_norm.h"
#include "sharded/zero/bucket_parameters.h"
#include "sharded/zero/gradient_scatter.h"
#include "sharded/zero/unit_waits.h"

namespace torchspan {

using data_parallel::Parameter;
using sharded::BucketShards;

/// The optimizer's parts of one rank. Everything is laid out at construction.
class ZeroRedundancyOptimizer::Impl {
 public:
  Impl(std::shared_ptr<data_parallel::WrappedModule> wrapped, std::vector<optim::ParamGroup> groups,
       sharded::ZeroOptions options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// `shadow`: this rank has no batches left and takes its gradients from the buckets.
  void step(bool shadow);
  double clip(double max_norm, double norm_type);
  void zero_grad();
  optim::Optimizer& optimizer() { return *optimizer_; }
  checkpoint::SourcePtr state_source() { return sharded::ranged_optimizer_source(*optimizer_, ranges_); }
  sharded::BucketParameters& parameters() { return *parameters_; }
  /// Waits for the parameters that no unit waits for.
  void begin_forward();

 private:
  /// This rank's part of a parameter.
  struct Piece {
    std::size_t bucket;
    BucketShards::Piece place;
    at::Tensor values;
  };
  using GroupOf = std::vector<std::size_t>;  // by parameter; kNoGroup: none
  static constexpr std::size_t kNoGroup = static_cast<std::size_t>(-1);

  std::string refusal(const std::vector<optim::ParamGroup>& groups) const;
  std::size_t index_of(const at::Tensor& parameter) const;
  void make_optimizer(std::vector<optim::ParamGroup> groups);
  /// The averages of a piece, as a view of what step() uses.
  at::Tensor gradient_of(const Piece& piece, bool shadow) const;
  std::vector<bool> agree_on_used(bool shadow, const std::string& failure);
  void make_waits();

  const std::shared_ptr<data_parallel::WrappedModule> wrapped_;
  const sharded::ZeroOptions options_;
  const std::vector<Parameter> trained_;
  const collective::Group group_;
  std::shared_ptr<sharded::GradientScatter> scatter_;
  std::unique_ptr<sharded::BucketParameters> parameters_;
  std::unique_ptr<sharded::UnitWaits> waits_;  // null: the forward of the whole module waits for everything
  std::vector<Piece> pieces_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> piece_of_;
  std::map<std::string, sharded::FlatRange> ranges_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

namespace {

constexpr std::array<std::string_view, 8> kElementwise = {"SGD",      "Adam",    "AdamW", "Adagrad",
                                                          "Adadelta", "RMSprop", "Rprop", "Adamax"};

/// Refuses to save or load while parameters arrive: those of the module are then of two steps.
class SettledSource final : public checkpoint::StateSource {
 public:
  SettledSource(checkpoint::SourcePtr source, std::function<bool()> arriving)
      : source_(std::move(source)), arriving_(std::move(arriving)) {}
  void save(checkpoint::StateWriter& writer) const override {
    check();
    source_->save(writer);
  }
  void load(const checkpoint::StateReader& reader) override {
    check();
    source_->load(reader);
  }

 private:
  void check() const {
    if (!arriving_()) return;
    throw Error(ErrorKind::kInvalid,
                "the parameters of the last step() still arrive, because overlap_forward is set; call "
                "synchronize() of the ZeroRedundancyOptimizer before state is saved or restored");
  }

  const checkpoint::SourcePtr source_;
  const std::function<bool()> arriving_;
};

optim::ParamGroup group_of_all(const data_parallel::WrappedModule& wrapped, optim::OptimizerSpec spec) {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  for (const Parameter& parameter : wrapped.parameters()) {
    tensors.push_back(parameter.tensor);
    names.push_back(parameter.name);
  }
  return {std::move(tensors), std::move(spec), std::move(names)};
}

}  // namespace

ZeroRedundancyOptimizer::Impl::Impl(std::shared_ptr<data_parallel::WrappedModule> wrapped,
                                    std::vector<optim::ParamGroup> groups, sharded::ZeroOptions options)
    : wrapped_(std::move(wrapped)),
      options_(options),
      trained_(wrapped_->parameters()),
      group_(wrapped_->reducer().group().split(0, wrapped_->reducer().group().rank())) {
  const auto agree = [&](const std::string& failure) {
    data_parallel::Agreement mine;
    mine.failure = failure;
    std::string kinds;
    for (const auto& group : groups)
      kinds += fmt::format(" {} of {}", group.spec.kind, group.parameters.size());
    mine.settings = {{"the optimizer", "[" + kinds + " ]"},
                     {"divide_gradients", options_.divide_gradients ? "true" : "false"},
                     {"overlap_forward", options_.overlap_forward ? "true" : "false"}};
    data_parallel::agree(group_, mine);
  };
  agree(refusal(groups));
  scatter_ = std::make_shared<sharded::GradientScatter>(
      sharded::shards_of(wrapped_->reducer().stats().bucket_parameters, trained_, group_.size()),
      options_.divide_gradients);
  std::string failure;
  try {
    parameters_ = std::make_unique<sharded::BucketParameters>(group_, scatter_->layout(), trained_);
    make_optimizer(groups);
  } catch (...) {
    failure = describe(std::current_exception()).text;
  }
  agree(failure);
  wrapped_->register_comm_hook(
      [scatter = scatter_](const data_parallel::GradientBucket& bucket, const collective::Group& group) {
        return scatter->reduce(bucket, group);
      },
      "ZeroRedundancyOptimizer");
  wrapped_->keep_buckets();
  if (options_.overlap_forward) make_waits();
}

ZeroRedundancyOptimizer::Impl::~Impl() {
  wrapped_->set_optimizer_hooks({});
  waits_.reset();
  scatter_->close();
  try {
    parameters_->wait_all();
  } catch (...) {  // the next operation over these ranks fails, too
  }
}

void ZeroRedundancyOptimizer::Impl::make_waits() {
  sharded::UnitWaits::BucketOf bucket_of;
  for (std::size_t bucket = 0; bucket < parameters_->size(); ++bucket) {
    for (const BucketShards::Place& place : scatter_->layout()[bucket].places)
      bucket_of.emplace(trained_[place.parameter].tensor.unsafeGetTensorImpl(), bucket);
  }
  waits_ = std::make_unique<sharded::UnitWaits>(*wrapped_->module(), bucket_of,
                                                [this](std::size_t bucket) { parameters_->wait(bucket); });
}

void ZeroRedundancyOptimizer::Impl::begin_forward() {
  if (!waits_) return parameters_->wait_all();
  for (const std::size_t bucket : waits_->others()) parameters_->wait(bucket);
}

std::size_t ZeroRedundancyOptimizer::Impl::index_of(const at::Tensor& parameter) const {
  const auto found = std::find_if(trained_.begin(), trained_.end(),
                                  [&](const Parameter& one) { return one.tensor.is_same(parameter); });
  return static_cast<std::size_t>(found - trained_.begin());
}

/// Why this rank cannot build the optimizer; empty if it can.
std::string ZeroRedundancyOptimizer::Impl::refusal(const std::vector<optim::ParamGroup>& groups) const {
  if (groups.empty()) return "a ZeroRedundancyOptimizer needs at least one group of parameters";
  std::vector<bool> listed(trained_.size());
  for (const optim::ParamGroup& group : groups) {
    if (std::find(kElementwise.begin(), kElementwise.end(), group.spec.kind) == kElementwise.end()) {
      return fmt::format(
          "the optimizer '{}' is not known to update each element separately, so its state cannot be "
          "divided; use one of {}",
          group.spec.kind, fmt::join(kElementwise, ", "));
    }
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const std::size_t index = index_of(group.parameters[i]);
      if (index == trained_.size()) {
        return fmt::format(
            "parameter {} of a group is not averaged by the DistributedDataParallel: it is frozen, "
            "ignored, or of another module",
            i < group.names.size() ? "'" + group.names[i] + "'" : std::to_string(i));
      }
      const Parameter& parameter = trained_[index];
      if (listed[index]) return fmt::format("parameter '{}' is in two groups; list it once", parameter.name);
      listed[index] = true;
    }
  }
  for (const Parameter& parameter : trained_) {
    if (parameter.sparse_gradient)
      return fmt::format("parameter '{}' has sparse gradients, which cannot be divided", parameter.name);
    if (!parameter.tensor.is_contiguous())
      return fmt::format("parameter '{}' is not contiguous; make it contiguous before wrapping",
                         parameter.name);
  }
  return {};
}

void ZeroRedundancyOptimizer::Impl::make_optimizer(std::vector<optim::ParamGroup> groups) {
  const at::NoGradGuard no_grad;
  struct Membership {
    std::size_t group = kNoGroup;
    std::string name;
  };
  std::vector<Membership> members(trained_.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].parameters.size(); ++i) {
      const std::size_t index = index_of(groups[g].parameters[i]);
      members[index] = {g, i < groups[g].names.size() ? groups[g].names[i] : trained_[index].name};
    }
    groups[g].parameters.clear();
    groups[g].names.clear();
  }
  for (std::size_t b = 0; b < scatter_->layout().size(); ++b) {
    for (const BucketShards::Piece& place : scatter_->layout()[b].pieces(group_.rank())) {
      const auto& [group, name] = members[place.parameter];
      if (group == kNoGroup) continue;
      const at::Tensor values =
          parameters_->flat(b).narrow(0, place.offset, place.end - place.begin).detach();
      piece_of_.emplace(values.unsafeGetTensorImpl(), pieces_.size());
      pieces_.push_back({b, place, values});
      groups[group].parameters.push_back(values);
      groups[group].names.push_back(name);
      ranges_[name] = {trained_[place.parameter].tensor.sizes().vec(), place.begin, place.end};
    }
  }
  for (optim::ParamGroup& group : groups) {
    if (!group.parameters.empty()) continue;
    group.parameters.push_back(at::empty({0}));  // this rank owns no elements of the group
    group.names.emplace_back("(none)");
  }
  optimizer_ = std::make_unique<optim::Optimizer>(std::move(groups));
}

at::Tensor ZeroRedundancyOptimizer::Impl::gradient_of(const Piece& piece, bool shadow) const {
  const Parameter& parameter = trained_[piece.place.parameter];
  const at::Tensor gradient = shadow ? at::Tensor() : parameter.tensor.grad();
  const std::int64_t count = piece.place.end - piece.place.begin;
  if (!gradient.defined()) {
    const at::Tensor buffer = scatter_->buffer(piece.bucket);
    return buffer.defined() ? buffer.narrow(0, piece.place.offset, count) : at::Tensor();
  }
  if (gradient.sizes() != parameter.tensor.sizes() || gradient.is_sparse() || !gradient.is_contiguous() ||
      gradient.scalar_type() != parameter.tensor.scalar_type()) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("the gradient of parameter '{}' must be dense and contiguous, and have the parameter's "
                    "shape and dtype",
                    parameter.name));
  }
  return gradient.detach().view({-1}).narrow(0, piece.place.begin, count);
}

/// Collective: which parameters have a gradient on any rank. Throws on all ranks if one has failed.
std::vector<bool> ZeroRedundancyOptimizer::Impl::agree_on_used(bool shadow, const std::string& failure) {
  const at::Tensor status = at::zeros({static_cast<std::int64_t>(trained_.size()) + 1}, at::kInt);
  auto* values = status.data_ptr<std::int32_t>();
  values[0] = failure.empty() ? 0 : 1;
  for (std::size_t i = 0; i < trained_.size(); ++i)
    values[i + 1] = !shadow && trained_[i].tensor.grad().defined() ? 1 : 0;
  group_.all_reduce(status, collective::kMax).wait();
  if (values[0] != 0) {
    data_parallel::Agreement mine;
    mine.failure = failure;
    data_parallel::agree(group_, mine);
  }
  std::vector<bool> used;
  for (std::size_t i = 0; i < trained_.size(); ++i) used.push_back(values[i + 1] != 0);
  return used;
}

/// Steps the bucket of the first layers first, whose parameters the next forward needs first.
void ZeroRedundancyOptimizer::Impl::step(bool shadow) {
  if (!scatter_->has_gradients()) {
    throw Error(
        ErrorKind::kInvalid,
        "step() without averaged gradients: run a backward pass through the DistributedDataParallel, outside "
        "of no_sync(), after the last step() or zero_grad()");
  }
  parameters_->wait_all();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  std::string failure;
  try {
    for (const Piece& piece : pieces_) gradients.push_back(gradient_of(piece, shadow));
  } catch (const Error& error) {
    failure = error.message();
  }
  const std::vector<bool> used = agree_on_used(shadow, failure);
  try {
    for (std::size_t bucket = parameters_->size(); bucket-- > 0;) {
      optimizer_->step([&](const at::Tensor& values) {
        const auto found = piece_of_.find(values.unsafeGetTensorImpl());
        if (found == piece_of_.end()) return at::Tensor();
        const Piece& piece = pieces_[found->second];
        const bool now = piece.bucket == bucket && used[piece.place.parameter];
        return now ? gradients[found->second] : at::Tensor();
      });
      parameters_->begin_gather(bucket);
    }
    if (!options_.overlap_forward) parameters_->wait_all();
  } catch (...) {  // other ranks wait for this rank's parts
    group_.abort(Error(
        ErrorKind::kCancelled,
        fmt::format("rank {} could not step: {}", group_.ranks()[static_cast<std::size_t>(group_.rank())],
                    describe(std::current_exception()).text)));
    throw;
  }
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    if (used[i] && !trained_[i].tensor.is_inference())
      trained_[i].tensor.unsafeGetTensorImpl()->bump_version();
  }
  shadow ? scatter_->clear() : zero_grad();
}

double ZeroRedundancyOptimizer::Impl::clip(double max_norm, double norm_type) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const Piece& piece : pieces_) {
    if (trained_[piece.place.parameter].tensor.grad().defined())
      gradients.push_back(gradient_of(piece, false));
  }
  return sharded::clip_over_ranks(group_, gradients, {max_norm, norm_type});
}

void ZeroRedundancyOptimizer::Impl::zero_grad() {
  for (const Parameter& parameter : trained_) parameter.tensor.mutable_grad() = at::Tensor();
  scatter_->clear();
}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(const std::shared_ptr<data_parallel::WrappedModule>& wrapped,
                                                 optim::OptimizerSpec spec, sharded::ZeroOptions options)
    : ZeroRedundancyOptimizer(
          wrapped, std::vector<optim::ParamGroup>{group_of_all(*wrapped, std::move(spec))}, options) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(const std::shared_ptr<data_parallel::WrappedModule>& wrapped,
                                                 std::vector<optim::ParamGroup> groups,
                                                 sharded::ZeroOptions options)
    : impl_(std::make_shared<Impl>(wrapped, std::move(groups), options)) {
  const auto call = [weak = std::weak_ptr<Impl>(impl_)](const auto& what) {
    if (const auto impl = weak.lock()) what(*impl);
  };
  wrapped->set_optimizer_hooks({[call] { call([](Impl& impl) { impl.begin_forward(); }); },
                                [call] { call([](Impl& impl) { impl.parameters().wait_all(); }); },
                                [call] { call([](Impl& impl) { impl.step(/*shadow=*/true); }); }});
}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() = default;

void ZeroRedundancyOptimizer::step() { impl_->step(/*shadow=*/false); }
void ZeroRedundancyOptimizer::synchronize() { impl_->parameters().wait_all(); }
std::size_t ZeroRedundancyOptimizer::arriving() const { return impl_->parameters().arriving(); }
double ZeroRedundancyOptimizer::clip_grad_norm(double max_norm, double norm_type) {
  return impl_->clip(max_norm, norm_type);
}
void ZeroRedundancyOptimizer::zero_grad() { impl_->zero_grad(); }
std::vector<double> ZeroRedundancyOptimizer::lrs() const { return impl_->optimizer().lrs(); }
void ZeroRedundancyOptimizer::set_lrs(const std::vector<double>& rates) { impl_->optimizer().set_lrs(rates); }
void ZeroRedundancyOptimizer::set_lr(double lr) { impl_->optimizer().set_lr(lr); }
checkpoint::SourcePtr ZeroRedundancyOptimizer::state_source() {
  return std::make_unique<SettledSource>(impl_->state_source(), [weak = std::weak_ptr<Impl>(impl_)] {
    const auto impl = weak.lock();
    return impl && impl->parameters().arriving() > 0;
  });
}

std::size_t ZeroRedundancyOptimizer::state_bytes() const {
  std::size_t bytes = 0;
  for (const auto& entry : impl_->optimizer().state_view()) bytes += entry.value().nbytes();
  return bytes;
}

}  // namespace torchspan
