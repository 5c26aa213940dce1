#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <exception>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/sharded/unit_forward.h>
#include <torchspan/optim/optimizer.h>
#include <torchspan/sharded.h>
#include <torchspan/state/source.h>

#include "core/api/throw_invalid.h"
#include "data_parallel/api/agreement.h"
#include "data_parallel/api/group_ranks.h"
#include "sharded/parts.h"
#include "sharded/zero/gradient_scatter.h"
#include "sharded/zero/join_protocol.h"

namespace torchspan::sharded {
namespace {

/// The parameters of a reducer's buckets, each bucket in one flat tensor, and the gathers that bring the other ranks'
/// parts. Use it from the training thread.
class BucketParameters {
 public:
  /// Moves the parameters into the flat tensors.
  BucketParameters(collective::Group group, std::vector<BucketShards> layout,
                   const std::vector<data_parallel::Parameter>& parameters);
  BucketParameters(const BucketParameters&) = delete;
  BucketParameters& operator=(const BucketParameters&) = delete;

  /// Moves parameters that the program gave other memory, as torch::load() does, back into the flat tensors, with their
  /// new values, unless their shape, dtype or device has changed.
  void adopt();
  /// Throws Error{kInvalid} for a parameter that adopt() left out.
  void check() const;

  /// adopt(), and returns when all buckets are whole.
  void settle() {
    adopt();
    wait_all();
  }

  std::size_t size() const { return flats_.size(); }
  const at::Tensor& flat(std::size_t bucket) const { return flats_[bucket]; }
  /// Collective: begins to replace the other ranks' parts of a bucket by theirs.
  void begin_gather(std::size_t bucket);
  /// Returns when the bucket's parameters are whole. After a gather has failed, always throws its failure.
  void wait(std::size_t bucket);
  void wait_all();
  /// Number of buckets with a gather that was not waited for.
  std::size_t arriving() const;

 private:
  struct Held {
    data_parallel::Parameter parameter;
    at::Tensor view;  ///< its place in the flat tensor
    std::size_t bucket;
    bool fits() const;
  };
  struct Gather {
    PartGather parts;
    Future<at::Tensor> remainder;
  };

  const collective::Group group_;
  const std::vector<BucketShards> layout_;
  std::vector<at::Tensor> flats_;
  std::vector<Held> held_;
  std::vector<std::optional<Gather>> gathers_;  ///< by bucket
  std::exception_ptr failure_;
};

BucketParameters::BucketParameters(collective::Group group, std::vector<BucketShards> layout,
                                   const std::vector<data_parallel::Parameter>& parameters)
    : group_(std::move(group)), layout_(std::move(layout)), gathers_(layout_.size()) {
  const at::NoGradGuard no_grad;
  for (const BucketShards& bucket : layout_) {
    const at::Tensor& like = parameters[bucket.places[0].parameter].tensor;
    flats_.push_back(shared_or_private(group_, bucket.count, like.options().requires_grad(false)));
    for (const BucketShards::Place& place : bucket.places) {
      const data_parallel::Parameter& parameter = parameters[place.parameter];
      const at::Tensor view =
          flats_.back().narrow(0, place.offset, place.count).view(parameter.tensor.sizes());
      view.copy_(parameter.tensor);
      parameter.tensor.set_data(view);
      held_.push_back({parameter, view, flats_.size() - 1});
    }
  }
}

bool BucketParameters::Held::fits() const {
  const at::Tensor& tensor = parameter.tensor;
  return tensor.sizes() == view.sizes() && tensor.scalar_type() == view.scalar_type() &&
         tensor.device() == view.device();
}

void BucketParameters::adopt() {
  for (const Held& held : held_) {
    const at::Tensor& tensor = held.parameter.tensor;
    if (tensor.numel() == 0 || !held.fits()) continue;
    if (tensor.data_ptr() == held.view.data_ptr() && tensor.is_contiguous()) continue;
    wait(held.bucket);  // the step before it
    const at::NoGradGuard no_grad;
    held.view.copy_(tensor);
    tensor.set_data(held.view);
  }
}

void BucketParameters::check() const {
  for (const Held& held : held_) {
    if (held.fits()) continue;
    const at::Tensor& tensor = held.parameter.tensor;
    throw_invalid(
        "parameter '{}' is {} {} on {} now, but was {} {} on {} when the ZeroRedundancyOptimizer was made; "
        "convert the module before",
        held.parameter.name, c10::toString(tensor.scalar_type()), c10::str(tensor.sizes()),
        tensor.device().str(), c10::toString(held.view.scalar_type()), c10::str(held.view.sizes()),
        held.view.device().str());
  }
}

void BucketParameters::begin_gather(std::size_t bucket) {
  wait(bucket);
  const BucketShards& shards = layout_[bucket];
  const at::Tensor& flat = flats_[bucket];
  const std::int64_t even = shards.ranks * shards.chunk;
  Gather gather{
      PartGather(group_, flat.narrow(0, 0, even), flat.narrow(0, shards.begin(group_.rank()), shards.chunk)),
      {}};
  if (shards.remainder() > 0)
    gather.remainder = group_.broadcast(flat.narrow(0, even, shards.remainder()), group_.size() - 1);
  gathers_[bucket] = std::move(gather);
}

void BucketParameters::wait(std::size_t bucket) {
  if (failure_) std::rethrow_exception(failure_);
  std::optional<Gather> gather = std::exchange(gathers_[bucket], std::nullopt);
  if (!gather) return;
  try {
    gather->parts.wait();
    if (gather->remainder.valid()) gather->remainder.wait();
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

void BucketParameters::wait_all() {
  for (std::size_t bucket = gathers_.size(); bucket-- > 0;) wait(bucket);
}

std::size_t BucketParameters::arriving() const {
  return static_cast<std::size_t>(
      std::count_if(gathers_.begin(), gathers_.end(), [](const auto& gather) { return gather.has_value(); }));
}

/// The state of an optimizer of pieces, and of parameters that an optimizer of the whole module would have without stepping
/// them. Refuses to save or load while parameters arrive: those of the module are then of two steps.
class SettledSource final : public state::StateSource {
 public:
  /// `never_stepped`: names in the state (Optimizer::state_name()).
  SettledSource(state::SourcePtr source, std::vector<std::string> never_stepped,
                std::function<bool()> arriving)
      : source_(std::move(source)),
        never_stepped_(std::move(never_stepped)),
        arriving_(std::move(arriving)) {}

  /// Throw Error{kInvalid} while parameters arrive.
  void save(state::StateWriter& writer) const override {
    check();
    source_->save(writer);
    for (const std::string& owner : never_stepped_)
      writer.add(owner + ".step", at::scalar_tensor(0, at::kLong));
  }

  void load(const state::StateReader& reader) override {
    check();
    source_->load(reader);
  }

 private:
  void check() const {
    if (!arriving_()) return;
    throw_invalid(
        "the parameters of the last step() still arrive, because overlap_forward is set; call synchronize() "
        "of the ZeroRedundancyOptimizer before state is saved or restored");
  }

  const state::SourcePtr source_;
  const std::vector<std::string> never_stepped_;
  const std::function<bool()> arriving_;
};

/// While it lives, each ts::Sharded module in a replicated module waits for the buckets of its parameters when its
/// forward begins. Use it from the training thread; the module outlives it.
class UnitWaits {
 public:
  using BucketOf =
      std::map<const c10::TensorImpl*, std::size_t>;  ///< by parameter; those that never arrive are not in it

  UnitWaits(torch::nn::Module& module, const BucketOf& bucket_of,
            const std::function<void(std::size_t)>& wait) {
    visit(module, nullptr);
    std::map<UnitModule*, std::set<std::size_t>> buckets;
    for (const auto& [parameter, unit] : unit_of_) {
      const auto found = bucket_of.find(parameter);
      if (found != bucket_of.end()) (unit != nullptr ? buckets[unit] : others_).insert(found->second);
    }
    for (const auto& [unit, its] : buckets) {
      units_.push_back(unit);
      unit->before_forward = [its = its, wait] {
        for (const std::size_t bucket : its) wait(bucket);
      };
    }
  }

  ~UnitWaits() {
    for (UnitModule* unit : units_) unit->before_forward = nullptr;
  }

  UnitWaits(const UnitWaits&) = delete;
  UnitWaits& operator=(const UnitWaits&) = delete;

  /// Buckets with parameters that are in no such module, or in several: the forward of the whole module waits for them.
  const std::set<std::size_t>& others() const { return others_; }

 private:
  void visit(torch::nn::Module& module, UnitModule* unit) {
    if (auto* found = dynamic_cast<UnitModule*>(&module)) unit = found;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!item.value().defined()) continue;
      const auto [place, is_new] = unit_of_.emplace(item.value().unsafeGetTensorImpl(), unit);
      if (!is_new && place->second != unit) place->second = nullptr;
    }
    for (const auto& child : module.named_children()) visit(*child.value(), unit);
  }

  std::vector<UnitModule*> units_;
  std::map<const c10::TensorImpl*, UnitModule*> unit_of_;  ///< null: the whole module
  std::set<std::size_t> others_;
};

}  // namespace

}  // namespace torchspan::sharded

namespace torchspan {

using data_parallel::Parameter;
using sharded::BucketShards;

/// The optimizer's parts of one rank. Everything is laid out at construction.
class ZeroRedundancyOptimizer::Impl {
 public:
  /// `never_stepped`: names in the state of parameters outside of the groups that the state lists, too.
  Impl(std::shared_ptr<data_parallel::WrappedModule> wrapped, std::vector<optim::ParamGroup> groups,
       sharded::ZeroOptions options, std::vector<std::string> never_stepped);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void step(const GradientOf& gradient_of);
  double clip(double max_norm, double norm_type, const GradientOf& gradient_of);
  bool unscale(double scale);
  /// On a rank without batches, after a reduction: takes part in what the others do until they have stepped or
  /// cleared their gradients, with the gradients in the buckets. If the reduction failed, only forgets it.
  void shadow(bool reduced);
  /// In join(), the training loop of this rank has ended: as zero_grad(), unless it has stepped.
  void body_ended();
  const sharded::JoinProtocol& join() const { return *join_; }
  void zero_grad();
  optim::Optimizer& optimizer() { return *optimizer_; }
  /// Names in the state (Optimizer::state_name()) of parameters that an optimizer of the whole module would have, and that are never stepped.
  const std::vector<std::string>& never_stepped() const { return never_stepped_; }
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
  using Verb = sharded::JoinProtocol::Verb;
  static constexpr std::size_t kNoGroup = static_cast<std::size_t>(-1);

  std::string refusal(const std::vector<optim::ParamGroup>& groups) const;
  std::size_t index_of(const at::Tensor& parameter) const;
  std::string name_in_module(const at::Tensor& parameter) const;
  void make_optimizer(std::vector<optim::ParamGroup> groups);
  /// Where a call finds gradients (empty: in `.grad`); null on a rank without batches, which has none.
  using Given = const GradientOf*;
  static at::Tensor whole_gradient(const Parameter& parameter, const GradientOf& gradient_of) {
    return gradient_of ? gradient_of(parameter.tensor) : parameter.tensor.grad();
  }
  /// The averages of a piece, as a view of what step() uses.
  at::Tensor average_of(const Piece& piece, Given given) const;
  void step_by(Given given);
  /// The averages of all pieces; undefined for those without one.
  std::vector<state::PlacedGradient> averages(Given given) const;
  double clip(const sharded::ClipTerms& terms, Given given);
  void clear();
  std::vector<state::PlacedGradient> agreed_averages(Given given) const;
  std::vector<bool> agree_on_step(bool shadow, const std::vector<bool>& given, const std::string& failure);
  void make_waits();

  const std::shared_ptr<data_parallel::WrappedModule> wrapped_;
  const sharded::ZeroOptions options_;
  const std::vector<Parameter> trained_;
  const collective::Group group_;
  const state::RanksPtr ranks_;
  std::vector<state::PlacedGradient>
      others_;  ///< the places of parameters of which this rank may have no part
  std::shared_ptr<sharded::GradientScatter> scatter_;
  std::unique_ptr<sharded::BucketParameters> parameters_;
  std::unique_ptr<sharded::UnitWaits> waits_;  // null: the forward of the whole module waits for everything
  std::vector<Piece> pieces_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> piece_of_;
  std::vector<std::string> never_stepped_;  // also of parameters without elements
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::shared_ptr<sharded::PendingAverages> pending_;
  std::unique_ptr<sharded::JoinProtocol> join_;
};

namespace {

constexpr std::array<std::string_view, 8> kElementwise = {"SGD",      "Adam",    "AdamW", "Adagrad",
                                                          "Adadelta", "RMSprop", "Rprop", "Adamax"};

constexpr const char* kNoGradients =
    "{}() of a ZeroRedundancyOptimizer found no gradient on any rank, although a backward pass was reduced: "
    "after "
    "context.backward() they are in the context, so pass gradient_of: [&](const at::Tensor& parameter) {{ "
    "return "
    "context.gradient(parameter); }}; to skip a step, call zero_grad() instead";

/// Of a group with this index.
std::string label_of(const optim::ParamGroup& group, std::size_t index) {
  return group.label.empty() ? std::to_string(index) : group.label;
}

optim::ParamGroup group_of_all(const data_parallel::WrappedModule& wrapped, optim::OptimizerSpec spec) {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  for (const Parameter& parameter : wrapped.parameters()) {
    tensors.push_back(parameter.tensor);
    names.push_back(parameter.name);
  }
  return {std::move(tensors), std::move(spec), std::move(names)};
}

/// What the state of an optim::Optimizer of the module lists besides group_of_all(): frozen and ignored parameters.
std::vector<std::string> others_of(const data_parallel::WrappedModule& wrapped,
                                   const optim::OptimizerSpec& spec) {
  std::unordered_set<const c10::TensorImpl*> averaged;
  for (const Parameter& parameter : wrapped.parameters())
    averaged.insert(parameter.tensor.unsafeGetTensorImpl());
  const optim::ParamGroup all(*wrapped.module(), spec);
  std::vector<std::string> owners;
  for (std::size_t i = 0; i < all.parameters.size(); ++i) {
    if (!averaged.contains(all.parameters[i].unsafeGetTensorImpl()))
      owners.push_back(optim::Optimizer::state_name("0", all.names[i]));
  }
  return owners;
}

/// Calls the optimizer at the events of the module, while it lives.
void connect(data_parallel::WrappedModule& wrapped,
             const std::shared_ptr<ZeroRedundancyOptimizer::Impl>& impl) {
  using Impl = ZeroRedundancyOptimizer::Impl;
  const auto call = [weak = std::weak_ptr<Impl>(impl)](const auto& what) {
    if (const auto alive = weak.lock()) what(*alive);
  };
  wrapped.set_optimizer_hooks(
      {[call] { call([](Impl& one) { one.begin_forward(); }); },
       [call] { call([](Impl& one) { one.parameters().settle(); }); },
       [call](bool reduced) { call([reduced](Impl& one) { one.shadow(reduced); }); },
       [call](const std::string& reason) { call([&reason](Impl& one) { one.join().give_up(reason); }); },
       [call] { call([](Impl& one) { one.join().check_round(); }); },
       [call] { call([](Impl& one) { one.body_ended(); }); }});
}

}  // namespace

ZeroRedundancyOptimizer::Impl::Impl(std::shared_ptr<data_parallel::WrappedModule> wrapped,
                                    std::vector<optim::ParamGroup> groups, sharded::ZeroOptions options,
                                    std::vector<std::string> never_stepped)
    : wrapped_(std::move(wrapped)),
      options_(options),
      trained_(wrapped_->parameters()),
      group_(wrapped_->reducer().group().split(0, wrapped_->reducer().group().rank())),
      ranks_(data_parallel::ranks_of(group_, state::kDataParallel)),
      never_stepped_(std::move(never_stepped)) {
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
  pending_ = std::make_shared<sharded::PendingAverages>(wrapped_, scatter_);
  join_ = std::make_unique<sharded::JoinProtocol>(group_, wrapped_, pending_);
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
  // Without gradients, the program may compute with other parameters for a while, such as averages.
  if (at::GradMode::is_enabled()) parameters_->adopt();
  if (!waits_) return parameters_->wait_all();
  for (const std::size_t bucket : waits_->others()) parameters_->wait(bucket);
}

std::size_t ZeroRedundancyOptimizer::Impl::index_of(const at::Tensor& parameter) const {
  const auto found = std::find_if(trained_.begin(), trained_.end(),
                                  [&](const Parameter& one) { return one.tensor.is_same(parameter); });
  return static_cast<std::size_t>(found - trained_.begin());
}

std::string ZeroRedundancyOptimizer::Impl::name_in_module(const at::Tensor& parameter) const {
  for (const auto& item : wrapped_->module()->named_parameters()) {
    if (item.value().is_same(parameter)) return item.key();
  }
  return "(of another module)";
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
        if (!group.parameters[i].requires_grad()) continue;  // frozen: listed, but never stepped
        return fmt::format(
            "parameter {} of a group is not averaged by the DistributedDataParallel: it is ignored, of "
            "another module, or was "
            "frozen when the module was wrapped",
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
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : trained_) tensors.push_back(parameter.tensor);
  if (const auto shared = sharded::overlapping(tensors)) {
    return fmt::format(
        "parameters '{}' and '{}' share memory, which would end: register one tensor in both modules",
        trained_[shared->first].name, trained_[shared->second].name);
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
      const at::Tensor& parameter = groups[g].parameters[i];
      const std::string name = i < groups[g].names.size() ? groups[g].names[i] : name_in_module(parameter);
      if (const std::size_t index = index_of(parameter); index < trained_.size()) {
        members[index] = {g, name};
      } else {
        never_stepped_.push_back(optim::Optimizer::state_name(label_of(groups[g], g), name));
      }
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
      const at::Tensor& whole = trained_[place.parameter].tensor;
      state::set_place(
          values, std::make_shared<state::Place>(state::range_of(state::place_of(whole), whole.sizes().vec(),
                                                                 place.begin, place.end, ranks_)));
      piece_of_.emplace(values.unsafeGetTensorImpl(), pieces_.size());
      pieces_.push_back({b, place, values});
      groups[group].parameters.push_back(values);
      groups[group].names.push_back(name);
    }
  }
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    const auto& [group, name] = members[i];
    const at::Tensor& whole = trained_[i].tensor;
    if (group != kNoGroup) {
      others_.push_back({{},
                         std::make_shared<state::Place>(
                             state::range_of(state::place_of(whole), whole.sizes().vec(), 0, 0, ranks_))});
    }
    if (group == kNoGroup || trained_[i].tensor.numel() > 0) continue;
    never_stepped_.push_back(optim::Optimizer::state_name(label_of(groups[group], group), name));
  }
  for (optim::ParamGroup& group : groups) {
    if (!group.parameters.empty()) continue;
    group.parameters.push_back(at::empty({0}));  // this rank owns no elements of the group
    state::set_place(group.parameters.back(),
                     std::make_shared<state::Place>(state::range_of(nullptr, {1}, 0, 0, ranks_)));
    group.names.emplace_back("(none)");
  }
  optimizer_ = std::make_unique<optim::Optimizer>(std::move(groups));
}

at::Tensor ZeroRedundancyOptimizer::Impl::average_of(const Piece& piece, Given given) const {
  const Parameter& parameter = trained_[piece.place.parameter];
  const at::Tensor gradient = given == nullptr ? at::Tensor() : whole_gradient(parameter, *given);
  const std::int64_t count = piece.place.end - piece.place.begin;
  if (!gradient.defined()) {
    const at::Tensor buffer = scatter_->buffer(piece.bucket);
    return buffer.defined() ? buffer.narrow(0, piece.place.offset, count) : at::Tensor();
  }
  if (gradient.sizes() != parameter.tensor.sizes() || gradient.is_sparse() || !gradient.is_contiguous() ||
      gradient.scalar_type() != parameter.tensor.scalar_type()) {
    throw_invalid(
        "the gradient of parameter '{}' must be dense and contiguous, and have the parameter's shape and "
        "dtype",
        parameter.name);
  }
  return gradient.detach().view({-1}).narrow(0, piece.place.begin, count);
}

/// Collective: which parameters have a gradient on any rank. Gives a rank without batches the learning rates of the others.
/// Throws on all ranks if one has failed, or if those with batches have different rates.
/// `given`: which parameters have a gradient here. `shadow`: a rank without batches.
std::vector<bool> ZeroRedundancyOptimizer::Impl::agree_on_step(bool shadow, const std::vector<bool>& given,
                                                               const std::string& failure) {
  std::vector<double> rates = optimizer_->lrs();
  const std::size_t count = trained_.size();
  const at::Tensor status = at::zeros({static_cast<std::int64_t>(1 + count + 2 * rates.size())}, at::kDouble);
  auto* values = status.data_ptr<double>();
  values[0] = failure.empty() ? 0 : 1;
  for (std::size_t i = 0; i < count; ++i) values[i + 1] = given[i] ? 1 : 0;
  double* largest = values + 1 + count;
  double* negated = largest + rates.size();
  for (std::size_t g = 0; g < rates.size(); ++g) {
    const bool none = shadow || std::isnan(rates[g]);  // the optimizer has no rate
    largest[g] = none ? -std::numeric_limits<double>::infinity() : rates[g];
    negated[g] = none ? -std::numeric_limits<double>::infinity() : -rates[g];
  }
  group_.all_reduce(status, collective::kMax).wait();
  if (values[0] != 0) {
    data_parallel::Agreement mine;
    mine.failure = failure;
    data_parallel::agree(group_, mine);
  }
  for (std::size_t g = 0; g < rates.size(); ++g) {
    if (std::isinf(largest[g])) continue;
    if (largest[g] != -negated[g]) {
      throw_invalid(
          "the ranks have learning rates from {} to {} in group {} of a ZeroRedundancyOptimizer, of which "
          "each steps a part: set the same on all ranks, for example by as many calls of a schedule; a rank "
          "that had fewer batches in join() has called it less often",
          -negated[g], largest[g], g);
    }
    rates[g] = largest[g];
  }
  if (shadow) optimizer_->set_lrs(rates);
  std::vector<bool> used;
  for (std::size_t i = 0; i < count; ++i) used.push_back(values[i + 1] != 0);
  if (count > 0 && std::ranges::none_of(used, std::identity())) throw_invalid(kNoGradients, "step");
  return used;
}

/// Steps the bucket of the first layers first, whose parameters the next forward needs first.
void ZeroRedundancyOptimizer::Impl::step_by(Given given) {
  parameters_->wait_all();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  std::vector<bool> has(trained_.size());
  std::string failure;
  try {
    parameters_->adopt();
    parameters_->check();
    for (const Piece& piece : pieces_) gradients.push_back(average_of(piece, given));
    for (std::size_t i = 0; given != nullptr && i < has.size(); ++i)
      has[i] = whole_gradient(trained_[i], *given).defined();
  } catch (...) {
    failure = to_error(std::current_exception()).message();
  }
  const std::vector<bool> used = agree_on_step(given == nullptr, has, failure);
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
  given == nullptr ? pending_->forget() : clear();
}

std::vector<state::PlacedGradient> ZeroRedundancyOptimizer::Impl::averages(Given given) const {
  const at::NoGradGuard no_grad;
  std::vector<state::PlacedGradient> gradients = others_;
  for (const Piece& piece : pieces_) {
    const bool has = given == nullptr || whole_gradient(trained_[piece.place.parameter], *given).defined();
    gradients.push_back({has ? average_of(piece, given) : at::Tensor(), state::place_of(piece.values)});
  }
  return gradients;
}

/// Collective: throws on all ranks if one has failed, whose program may have thrown.
std::vector<state::PlacedGradient> ZeroRedundancyOptimizer::Impl::agreed_averages(Given given) const {
  std::vector<state::PlacedGradient> gradients;
  data_parallel::Agreement mine;
  try {
    gradients = averages(given);
  } catch (...) {
    mine.failure = to_error(std::current_exception()).message();
  }
  data_parallel::agree(group_, mine);
  return gradients;
}

double ZeroRedundancyOptimizer::Impl::clip(const sharded::ClipTerms& terms, Given given) {
  return state::clip(agreed_averages(given), terms.max_norm, terms.norm_type);
}

bool ZeroRedundancyOptimizer::Impl::unscale(double scale) {
  if (join_->is_followed())
    throw Error(ErrorKind::kUnsupported,
                "in join(), gradients of a ZeroRedundancyOptimizer cannot be unscaled");
  pending_->check("unscale");
  const GradientOf of_parameters;
  return sharded::unscale_at_places(agreed_averages(&of_parameters), scale);
}

void ZeroRedundancyOptimizer::Impl::step(const GradientOf& gradient_of) {
  pending_->check("step");
  join_->announce(Verb::kStep);
  step_by(&gradient_of);
}

double ZeroRedundancyOptimizer::Impl::clip(double max_norm, double norm_type, const GradientOf& gradient_of) {
  const sharded::ClipTerms terms(max_norm, norm_type);  // checked before anything is sent
  if (join_->is_followed())
    pending_->check("clip_grad_norm");  // ranks without batches follow reductions only
  join_->announce(Verb::kClip, max_norm, norm_type);
  const double norm = clip(terms, &gradient_of);
  if (norm == 0 && pending_->exist() && std::ranges::none_of(trained_, [&](const Parameter& one) {
        return whole_gradient(one, gradient_of).defined();
      }))
    throw_invalid(kNoGradients, "clip_grad_norm");
  return norm;
}

void ZeroRedundancyOptimizer::Impl::shadow(bool reduced) {
  if (reduced) {
    join_->follow(
        {[this] { step_by(nullptr); }, [this](const sharded::ClipTerms& terms) { clip(terms, nullptr); }});
  }
  pending_->forget();
}

void ZeroRedundancyOptimizer::Impl::body_ended() {
  if (pending_->any_begun()) zero_grad();
}

void ZeroRedundancyOptimizer::Impl::zero_grad() {
  if (pending_->exist()) join_->announce(Verb::kClear);
  clear();
}

void ZeroRedundancyOptimizer::Impl::clear() {
  for (const Parameter& parameter : trained_) parameter.tensor.mutable_grad() = at::Tensor();
  pending_->forget();
}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(const std::shared_ptr<data_parallel::WrappedModule>& wrapped,
                                                 optim::OptimizerSpec spec, sharded::ZeroOptions options)
    : impl_(make_process_shared<Impl>(wrapped, std::vector<optim::ParamGroup>{group_of_all(*wrapped, spec)},
                                      options, others_of(*wrapped, spec))) {
  connect(*wrapped, impl_);
}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(const std::shared_ptr<data_parallel::WrappedModule>& wrapped,
                                                 std::vector<optim::ParamGroup> groups,
                                                 sharded::ZeroOptions options)
    : impl_(make_process_shared<Impl>(wrapped, std::move(groups), options, std::vector<std::string>())) {
  connect(*wrapped, impl_);
}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() = default;

void ZeroRedundancyOptimizer::step(const GradientOf& gradient_of) { impl_->step(gradient_of); }
void ZeroRedundancyOptimizer::synchronize() { impl_->parameters().wait_all(); }
std::size_t ZeroRedundancyOptimizer::arriving() const { return impl_->parameters().arriving(); }
double ZeroRedundancyOptimizer::clip_grad_norm(double max_norm, double norm_type,
                                               const GradientOf& gradient_of) {
  return impl_->clip(max_norm, norm_type, gradient_of);
}
bool ZeroRedundancyOptimizer::unscale(double scale) { return impl_->unscale(scale); }
void ZeroRedundancyOptimizer::zero_grad() { impl_->zero_grad(); }
std::vector<double> ZeroRedundancyOptimizer::lrs() const { return impl_->optimizer().lrs(); }
void ZeroRedundancyOptimizer::set_lrs(const std::vector<double>& rates) { impl_->optimizer().set_lrs(rates); }
void ZeroRedundancyOptimizer::set_lr(double lr) { impl_->optimizer().set_lr(lr); }
state::SourcePtr ZeroRedundancyOptimizer::state_source() {
  const auto arriving = [weak = std::weak_ptr<Impl>(impl_)] {
    const auto impl = weak.lock();
    return impl && impl->parameters().arriving() > 0;
  };
  return std::make_unique<sharded::SettledSource>(impl_->optimizer().state_source(), impl_->never_stepped(),
                                                  arriving);
}

std::size_t ZeroRedundancyOptimizer::state_bytes() const {
  std::size_t bytes = 0;
  for (const auto& entry : impl_->optimizer().state_view()) bytes += entry.value().nbytes();
  return bytes;
}

}  // namespace torchspan
