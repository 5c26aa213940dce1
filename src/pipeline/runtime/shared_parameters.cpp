#include "pipeline/runtime/shared_parameters.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/wire.h>

#include "core/api/throw_invalid.h"
#include "pipeline/runtime/agreement.h"

namespace torchspan::pipeline {
namespace {

using TiedParameters = std::vector<TiedParameter>;

/// One tensor of a layer on the worker that built it, as a line of a report.
struct Held {
  std::int64_t id = 0;
  bool learns = false;
  bool tied = false;  ///< by Layers::tie(): the copies may differ between steps
  std::string name;   ///< in its layer
  std::string owner;  ///< "layer 'Linear' (order 3, stage 1 on 'worker1')"

  std::string line() const {
    return fmt::format("{}\t{}\t{}\t{}\n", id, tied ? 2 : learns ? 1 : 0, name, owner);
  }
};

std::vector<Held> parse(const std::string& report) {
  std::vector<Held> all;
  for (std::size_t begin = 0; begin < report.size();) {
    const std::size_t first = report.find('\t', begin), second = report.find('\t', first + 1);
    const std::size_t third = report.find('\t', second + 1), end = report.find('\n', third + 1);
    Held held;
    std::from_chars(report.data() + begin, report.data() + first, held.id);
    held.learns = report[first + 1] == '1';
    held.tied = report[first + 1] == '2';
    held.name = report.substr(second + 1, third - second - 1);
    held.owner = report.substr(third + 1, end - third - 1);
    all.push_back(std::move(held));
    begin = end + 1;
  }
  return all;
}

std::string text_of(const std::vector<Held>& holders) {
  std::vector<std::string> texts;
  for (const Held& held : holders) texts.push_back(fmt::format("'{}' of {}", held.name, held.owner));
  return fmt::format("{}", fmt::join(texts, " and "));
}

bool is_tied(const LocalPipeline& local, std::size_t layer, const std::string& name) {
  for (const auto& tie : local.declared_ties) {
    for (const TiedParameter& parameter : tie) {
      if (static_cast<std::size_t>(parameter.layer) == layer && parameter.name == name) return true;
    }
  }
  return false;
}

int first_order(const Plan& plan, int layer) {
  int order = 0;
  while (plan.invocations[static_cast<std::size_t>(order)].layer != layer) ++order;
  return order;
}

/// Memory that a layer refers to.
struct Extent {
  const void* storage = nullptr;
  std::int64_t begin = 0, end = 0;  ///< in bytes
  int layer = 0;
  std::int64_t id = 0;  ///< of the first extent that overlaps it; the same on all workers
};

Extent extent_of(const at::Tensor& tensor) {
  Extent extent;
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return extent;
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto bytes = static_cast<std::int64_t>(tensor.element_size());
  extent.storage = tensor.storage().unsafeGetStorageImpl();
  extent.begin = tensor.storage_offset() * bytes;
  extent.end = extent.begin + (last + 1) * bytes;
  return extent;
}

/// Null if none overlaps.
const Extent* find_extent(const std::vector<Extent>& extents, const Extent& extent) {
  if (extent.storage == nullptr) return nullptr;
  for (const Extent& known : extents) {
    if (known.storage == extent.storage && known.begin < extent.end && extent.begin < known.end)
      return &known;
  }
  return nullptr;
}

[[noreturn]] void refuse_tie(const LocalPipeline& local, const std::string& why) {
  throw_invalid("Layers::tie() in pipeline '{}': {}", local.options.name, why);
}

std::string name_of(const LocalPipeline& local, const TiedParameter& parameter) {
  return fmt::format("'{}' of layer {} ('{}')", parameter.name, parameter.layer,
                     local.plan.layers[static_cast<std::size_t>(parameter.layer)]);
}

int worker_of(const LocalPipeline& local, const TiedParameter& parameter) {
  const Location& location = local.plan.locations[static_cast<std::size_t>(parameter.layer)];
  return local.plan.worker_of_stage[static_cast<std::size_t>(location.stage)];
}

/// Throws for ties that are wrong whatever the layers have; the same on all workers.
void check_ties(const LocalPipeline& local, const std::vector<TiedParameters>& ties) {
  std::set<std::pair<int, std::string>> seen;
  for (const TiedParameters& tie : ties) {
    if (tie.size() < 2) refuse_tie(local, "a tie needs two parameters or more");
    for (const TiedParameter& parameter : tie) {
      if (seen.emplace(parameter.layer, parameter.name).second) continue;
      refuse_tie(local,
                 fmt::format("parameter {} is tied twice; list all parameters that are equal in one tie",
                             name_of(local, parameter)));
    }
  }
}

at::Tensor find_parameter(const LocalPipeline& local, const TiedParameter& parameter) {
  const auto& module = local.layers[static_cast<std::size_t>(parameter.layer)].module;
  const std::string what = name_of(local, parameter);
  if (!module) refuse_tie(local, fmt::format("the layer of parameter {} has no parameters", what));
  const auto all = module->named_parameters();
  if (const at::Tensor* found = all.find(parameter.name)) return *found;
  refuse_tie(local,
             fmt::format("parameter {} does not exist; the layer has {}", what, fmt::join(all.keys(), ", ")));
}

/// A line that must be the same for all copies.
std::string form_of(const at::Tensor& tensor) {
  return fmt::format("{} [{}], {}", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "),
                     tensor.requires_grad() ? "requires gradients" : "frozen");
}

/// Lists the form of each tied parameter of this worker: "tie member form" by line.
std::string describe_own_ties(const LocalPipeline& local) {
  std::string text;
  for (std::size_t tie = 0; tie < local.declared_ties.size(); ++tie) {
    const TiedParameters& parameters = local.declared_ties[tie];
    for (std::size_t member = 0; member < parameters.size(); ++member) {
      if (worker_of(local, parameters[member]) != local.me) continue;
      text += fmt::format("{} {} {}\n", tie, member, form_of(find_parameter(local, parameters[member])));
    }
  }
  return text;
}

/// Throws unless the parameters of each tie have one form. `texts` are the describe_own_ties() of all workers.
void compare_forms(const LocalPipeline& local, const std::vector<std::string>& texts) {
  std::map<std::pair<std::size_t, std::size_t>, std::string> forms;  // by tie and member
  for (const std::string& text : texts) {
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = text.find('\n', begin);
      std::size_t used = 0;
      const std::string line = text.substr(begin, end - begin);
      const std::size_t tie = std::stoull(line, &used);
      const std::size_t space = line.find(' ', used + 1);
      forms[{tie, std::stoull(line.substr(used))}] = line.substr(space + 1);
      begin = end + 1;
    }
  }
  for (const auto& [place, form] : forms) {
    const auto& [tie, member] = place;
    const std::string& first = forms.at({tie, 0});
    if (form == first) continue;
    const TiedParameters& parameters = local.declared_ties[tie];
    refuse_tie(local,
               fmt::format("parameter {} is {}, parameter {} is {}; tied parameters must match",
                           name_of(local, parameters[0]), first, name_of(local, parameters[member]), form));
  }
}

std::vector<Tie> find_ties(const LocalPipeline& local) {
  std::vector<Tie> ties;
  for (const TiedParameters& parameters : local.declared_ties) {
    Tie tie{name_of(local, parameters.front()), {}, {}};
    for (const TiedParameter& parameter : parameters) {
      const int worker = worker_of(local, parameter);
      if (std::find(tie.workers.begin(), tie.workers.end(), worker) == tie.workers.end())
        tie.workers.push_back(worker);
      if (worker != local.me) continue;
      const at::Tensor copy = find_parameter(local, parameter);
      const bool known = std::any_of(tie.copies.begin(), tie.copies.end(),
                                     [&](const at::Tensor& other) { return other.is_same(copy); });
      if (!known) tie.copies.push_back(copy);
    }
    ties.push_back(std::move(tie));
  }
  return ties;
}

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Of a digest in describe_tensors().
constexpr std::size_t kDigits = 16;

NamedTensors tensors_of(const LocalPipeline& local) {
  NamedTensors all;
  for (std::size_t layer = 0; layer < local.layers.size(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    const auto add = [&](const auto& items, const char* kind) {
      for (const auto& item : items) {
        if (item.value().defined())
          all.emplace_back(
              fmt::format("{} '{}' of layer {} ('{}')", kind, item.key(), layer, local.plan.layers[layer]),
              item.value());
      }
    };
    add(module->named_parameters(), "parameter");
    add(module->named_buffers(), "buffer");
  }
  return all;
}

std::string form_of_tensor(const std::pair<std::string, at::Tensor>& named) {
  return fmt::format("{}: {} [{}]", named.first, c10::toString(named.second.scalar_type()),
                     fmt::join(named.second.sizes(), ", "));
}

std::uint64_t digest_of_value(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().cpu().contiguous();
  return wire::digest(std::string_view(static_cast<const char*>(plain.data_ptr()), plain.nbytes()));
}

/// The forms and the digests of this worker's tensors: two numbers of 16 digits for each tensor.
std::string describe_tensors(const NamedTensors& tensors) {
  std::string text;
  for (const auto& named : tensors)
    text += fmt::format("{:016x}{:016x}", wire::digest(form_of_tensor(named)), digest_of_value(named.second));
  return text;
}

[[noreturn]] void refuse_difference(const LocalPipeline& local, std::size_t replica,
                                    const std::string& what) {
  throw_invalid(
      "the replicas of pipeline '{}' have different layers: worker '{}' of replica {} and worker '{}' of "
      "replica 0 differ at {}; build the same layers in all replicas",
      local.options.name, local.grid.names_of(local.me)[replica], replica, local.grid.names_of(local.me)[0],
      what);
}

/// The tensors whose values differ from those of replica 0.
std::vector<std::size_t> find_differences(const LocalPipeline& local, const NamedTensors& tensors) {
  const std::vector<std::string> all =
      all_gather_text(local.worker, describe_tensors(tensors), local.grid.names_of(local.me),
                      kCreationTimeout, local.options.while_waiting);
  std::vector<std::size_t> different;
  const auto part_of = [](const std::string& text, std::size_t index) {
    return std::string_view(text).substr(std::min(text.size(), index * kDigits), kDigits);
  };
  const std::string& mine = all[static_cast<std::size_t>(local.grid.mine)];
  for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    for (std::size_t replica = 1; replica < all.size(); ++replica) {
      if (part_of(all[replica], 2 * tensor) != part_of(all[0], 2 * tensor))
        refuse_difference(local, replica, form_of_tensor(tensors[tensor]));
    }
    if (part_of(mine, 2 * tensor + 1) != part_of(all[0], 2 * tensor + 1)) different.push_back(tensor);
  }
  for (std::size_t replica = 1; replica < all.size(); ++replica) {
    if (all[replica].size() != all[0].size())
      refuse_difference(local, replica, "the number of parameters and buffers");
  }
  return different;
}

/// A request for initial values ends before the one that would exceed this, if that is not the first.
constexpr std::size_t kBytesPerRequest = std::size_t{1} << 28;

/// Sets tensors to the values that another worker offers, which has them in the same shapes. `which` are the indices of the
/// values among those that it offers.
void copy_from(const LocalPipeline& local, const std::string& worker, const std::vector<std::int32_t>& which,
               const NamedTensors& targets) {
  for (std::size_t next = 0; next < which.size();) {
    AskInitialValues ask{{local.id, 0}, {}};
    const std::size_t first = next;
    for (std::size_t bytes = 0; next < which.size(); ++next) {
      bytes += targets[next].second.nbytes();
      if (next > first && bytes > kBytesPerRequest) break;
      ask.which.push_back(which[next]);
    }
    const Deadline limit = local.executor().deadline_in(kCreationTimeout);
    const auto values =
        wait_for(local.worker.request(Destination(worker), ask, limit), local.options.while_waiting);
    for (std::size_t i = 0; i < ask.which.size(); ++i) {
      const auto& [name, target] = targets[first + i];
      const at::Tensor value = i < values.size() ? values[i] : at::Tensor();
      const bool fits =
          value.defined() && value.sizes() == target.sizes() && value.scalar_type() == target.scalar_type();
      if (!fits) {
        throw Error(ErrorKind::kInvalid,
                    fmt::format("worker '{}' sent {} bytes instead of {} for {}", worker,
                                value.defined() ? value.nbytes() : 0, target.nbytes(), name))
            .with_worker(worker);
      }
      target.copy_(value);
    }
  }
}

/// Lets the other workers read the first copies of ties, then the parameters and buffers of a replica. Before the exchange
/// after which they may ask.
void offer_values(const LocalPipeline& local) {
  std::vector<at::Tensor> values;
  for (const Tie& tie : local.ties) values.push_back(tie.copies.empty() ? at::Tensor() : tie.copies.front());
  if (local.grid.count() > 1) {
    for (const auto& [name, tensor] : tensors_of(local)) values.push_back(tensor);
  }
  local.event_queue->offer(std::move(values));
}

/// Sets the copies of this worker to the values of the first copies.
void copy_tied_values(const LocalPipeline& local) {
  const torch::autograd::AutoGradMode no_grad(false);
  for (std::size_t tie = 0; tie < local.ties.size(); ++tie) {
    const auto& [name, workers, copies] = local.ties[tie];
    if (copies.empty()) continue;
    if (workers.front() != local.me) {
      const std::string& first = local.plan.workers[static_cast<std::size_t>(workers.front())];
      copy_from(local, first, {static_cast<std::int32_t>(tie)}, {{name, copies.front()}});
    }
    for (std::size_t copy = 1; copy < copies.size(); ++copy) copies[copy].copy_(copies.front());
  }
}

/// Gives this worker's parameters and buffers the values that they have in replica 0. Collective over the workers of all
/// replicas that own the same stages. Throws Error{kInvalid} if shapes or dtypes differ.
void copy_from_first_replica(const LocalPipeline& local) {
  const torch::autograd::AutoGradMode no_grad(false);
  const NamedTensors tensors = tensors_of(local);
  std::vector<std::int32_t> which;
  NamedTensors targets;
  for (const std::size_t i : find_differences(local, tensors)) {
    which.push_back(static_cast<std::int32_t>(local.ties.size() + i));
    targets.push_back(tensors[i]);
  }
  copy_from(local, local.grid.names_of(local.me).front(), which, targets);
}

}  // namespace

std::string to_text(const std::vector<TiedParameters>& ties) {
  std::string text;
  for (const TiedParameters& tie : ties) {
    text += "tie";
    for (const TiedParameter& parameter : tie) text += fmt::format(" {}.{}", parameter.layer, parameter.name);
    text += '\n';
  }
  return text;
}

std::string report_shared_tensors(const LocalPipeline& local, const Layers& layers) {
  std::vector<Extent> extents;
  std::set<std::int64_t> shared;  // ids that several layers refer to
  for (std::size_t layer = 0; layer < layers.specs().size(); ++layer) {
    if (!layers.specs()[layer].existing) continue;
    std::int64_t place = 0;
    for (const at::Tensor& tensor : layers.specs()[layer].existing()) {
      Extent extent = extent_of(tensor);
      extent.layer = static_cast<int>(layer);
      extent.id = static_cast<std::int64_t>(layer) << 32 | place++;
      if (const Extent* known = find_extent(extents, extent)) {
        extent.id = known->id;
        if (known->layer != extent.layer) shared.insert(extent.id);
      }
      if (extent.storage != nullptr) extents.push_back(extent);
    }
  }
  std::string text;
  for (std::size_t layer = 0; layer < local.layers.size() && !shared.empty(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    const std::string owner = local.plan.describe(first_order(local.plan, static_cast<int>(layer)));
    std::set<std::int64_t> reported;
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      const Extent* known = find_extent(extents, extent_of(tensor));
      if (known == nullptr || !shared.contains(known->id) || !reported.insert(known->id).second) return;
      text += Held{known->id, tensor.requires_grad(), is_tied(local, layer, name), name, owner}.line();
    };
    for (const auto& parameter : module->named_parameters()) add(parameter.key(), parameter.value());
    for (const auto& buffer : module->named_buffers()) add(buffer.key(), buffer.value());
  }
  return text;
}

std::vector<SharedConstant> check_shared_tensors(const LocalPipeline& local,
                                                 const std::vector<std::string>& reports) {
  std::map<std::int64_t, std::vector<Held>> holders;
  std::map<std::int64_t, std::set<std::size_t>> workers;
  for (std::size_t worker = 0; worker < reports.size(); ++worker) {
    for (Held& held : parse(reports[worker])) {
      workers[held.id].insert(worker);
      holders[held.id].push_back(std::move(held));
    }
  }
  std::vector<std::string> untied;
  std::map<std::string, std::string> constant;  // name and owner -> all holders
  for (const auto& [id, all] : holders) {
    if (workers[id].size() < 2) continue;
    const bool tied = std::all_of(all.begin(), all.end(), [](const Held& held) { return held.tied; });
    if (tied) continue;
    bool learns = false;
    for (const Held& held : all) learns = learns || held.learns || held.tied;
    if (learns) untied.push_back(text_of(all));
    for (const Held& held : all) constant.emplace(held.owner + '\t' + held.name, text_of(all));
  }
  if (!untied.empty()) {
    throw_invalid(
        "layers of pipeline '{}' on different workers share a parameter: {}. Each worker would train its own "
        "copy: tie all of them (Layers::tie), give these stages one owner (PipelineOptions::workers), or "
        "make them uses of one layer: Layers::reuse(first, \"name\", &Class::method)",
        local.options.name, fmt::join(untied, "; "));
  }
  std::vector<SharedConstant> mine;
  for (std::size_t layer = 0; layer < local.layers.size() && !constant.empty(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    const std::string owner = local.plan.describe(first_order(local.plan, static_cast<int>(layer)));
    const auto keep = [&](const std::string& name, const at::Tensor& tensor) {
      const auto found = constant.find(owner + '\t' + name);
      if (found != constant.end() && !tensor.is_inference()) mine.push_back({tensor, found->second});
    };
    for (const auto& parameter : module->named_parameters()) keep(parameter.key(), parameter.value());
    for (const auto& buffer : module->named_buffers()) keep(buffer.key(), buffer.value());
  }
  return mine;
}

void share_initial_values(LocalPipeline& local, const Layers& layers) {
  const bool replicas = local.grid.count() > 1;
  if (layers.ties().empty() && !replicas) return;
  const auto make_ties = [&] {
    if (layers.ties().empty()) return offer_values(local);
    check_ties(local, layers.ties());
    const auto find = [&] {
      local.ties = find_ties(local);
      offer_values(local);
      return describe_own_ties(local);
    };
    compare_forms(local, all_or_none(local.worker, local.plan.workers, ErrorKind::kInvalid, find,
                                     local.options.while_waiting));
  };
  if (!replicas) make_ties();  // fails on all workers or on none
  const auto share = [&] {
    if (replicas) make_ties();
    copy_tied_values(local);
    if (replicas) copy_from_first_replica(local);
    return std::string();
  };
  all_or_none(local.worker, local.grid.all_names(), ErrorKind::kInvalid, share, local.options.while_waiting);
  local.event_queue->offer({});
}

}  // namespace torchspan::pipeline
