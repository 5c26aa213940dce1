#include "data_parallel/agreement/reducer_agreement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <string>

#include <torchspan/core/error.h>

#include "data_parallel/passes/slot_hooks.h"

namespace torchspan::data_parallel {
namespace {

std::string on(bool flag) { return flag ? "true" : "false"; }

void check_replicas(const Reducer::Replicas& replicas) {
  if (replicas.empty() || replicas[0].empty()) {
    throw Error(ErrorKind::kInvalid, "there are no parameters, so there are no gradients to reduce");
  }
  bool trainable = false;
  std::map<const c10::TensorImpl*, std::string> listed;
  for (std::size_t r = 0; r < replicas.size(); ++r) {
    const std::vector<Parameter>& replica = replicas[r];
    const std::string of_replica = replicas.size() > 1 ? fmt::format(" of replica {}", r) : "";
    if (replica.size() != replicas[0].size()) {
      throw Error(ErrorKind::kInvalid, fmt::format("one replica has {} parameters, another has {}",
                                                   replicas[0].size(), replica.size()));
    }
    for (std::size_t i = 0; i < replica.size(); ++i) {
      const Parameter& parameter = replica[i];
      const at::Tensor& like = replicas[0][i].tensor;
      const auto refuse = [&](const std::string& why) {
        throw Error(ErrorKind::kInvalid, fmt::format("parameter '{}' {}", parameter.name, why));
      };
      if (!parameter.tensor.defined()) refuse("is undefined");
      const auto [first_entry, is_new] = listed.emplace(parameter.tensor.unsafeGetTensorImpl(),
                                                        fmt::format("'{}'{}", parameter.name, of_replica));
      if (!is_new) {
        throw Error(ErrorKind::kInvalid,
                    fmt::format("parameter '{}'{} is the same tensor as {}; {}", parameter.name, of_replica,
                                first_entry->second,
                                replicas.size() > 1 ? "list it once, and give each replica its own copy"
                                                    : "list it once"));
      }
      check_not_stepped_in_backward(parameter);
      if (parameter.tensor.is_sparse()) refuse("is a sparse tensor; only its gradient may be sparse");
      if (parameter.tensor.requires_grad() && !parameter.tensor.is_leaf()) {
        refuse(
            "is not a leaf of the graph: it was computed from other tensors, so backward leaves no gradient "
            "in it");
      }
      const c10::Device device = parameter.tensor.device(), first = replicas[0][0].tensor.device();
      if (device != first) {
        throw Error(
            ErrorKind::kInvalid,
            fmt::format("parameter '{}' is on {}, but '{}' is on {}: a process averages the gradients of "
                        "one device, so run one process for each device, or put the parts of a model that "
                        "spans devices into a Pipeline",
                        parameter.name, device.str(), replicas[0][0].name, first.str()));
      }
      if (parameter.tensor.sizes() != like.sizes() || parameter.tensor.strides() != like.strides() ||
          parameter.tensor.scalar_type() != like.scalar_type() ||
          parameter.tensor.requires_grad() != like.requires_grad()) {
        refuse("differs between the replicas of this process in shape, strides, dtype or requires_grad");
      }
      trainable = trainable || parameter.tensor.requires_grad();
    }
  }
  if (!trainable) {
    throw Error(ErrorKind::kInvalid,
                "no parameter requires a gradient, so there is nothing to reduce; use the module as it is");
  }
}

}  // namespace

Agreement reducer_agreement(const Reducer::Replicas& replicas, const DataParallelOptions& options,
                            const collective::Group& group) {
  Agreement mine;
  try {
    options.validate();
    check_replicas(replicas);
    for (const Parameter& parameter : replicas[0]) check_device(group, parameter.name, parameter.tensor);
  } catch (const Error& error) {
    mine.failure = error.message();
    return mine;
  }
  mine.settings = {{"the layout of this handshake", "1"},
                   {"bucket_cap_mb", fmt::format("{}", options.bucket_cap_mb)},
                   {"first_bucket_mb", fmt::format("{}", options.first_bucket_mb)},
                   {"bucket_cap_mb_list", fmt::format("[{}]", fmt::join(options.bucket_cap_mb_list, ", "))},
                   {"find_unused_parameters", on(options.find_unused_parameters)},
                   {"static_graph", on(options.static_graph)},
                   {"rebuild_buckets", on(options.rebuild_buckets)},
                   {"broadcast_buffers", on(options.broadcast_buffers)},
                   {"initial_sync", on(options.initial_sync)},
                   {"partial_backward", on(options.partial_backward)},
                   {"the number of replicas in a process", fmt::format("{}", replicas.size())}};
  for (const Parameter& parameter : replicas[0])
    mine.add(parameter.name, parameter.tensor, parameter.sparse_gradient);
  return mine;
}

}  // namespace torchspan::data_parallel
