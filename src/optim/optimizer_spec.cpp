#include <fmt/format.h>
#include <fmt/ranges.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/adadelta.h>
#include <torchspan/optim/adagrad.h>
#include <torchspan/optim/adam.h>
#include <torchspan/optim/adamax.h>
#include <torchspan/optim/adamw.h>
#include <torchspan/optim/optimizer_spec.h>
#include <torchspan/optim/rmsprop.h>
#include <torchspan/optim/rprop.h>
#include <torchspan/optim/sgd.h>
#include <torchspan/optim/sparse_adam.h>

namespace torchspan::optim {

OptimizerTable::OptimizerTable() {
  add<SGD>();
  add<Adadelta>();
  add<Adagrad>();
  add<Adam>();
  add<Adamax>();
  add<AdamW>();
  add<RMSprop>();
  add<Rprop>();
  add<SparseAdam>();
}

OptimizerSpec::OptimizerSpec(std::string_view kind, std::uint64_t type, wire::Payload payload)
    : kind(kind), type(type), options(std::move(payload.value)) {
  if (!payload.tensors.empty() || !payload.references.empty()) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("the options of optimizer '{}' contain tensors or references; a spec may contain "
                            "plain values only",
                            kind));
  }
}

std::unique_ptr<FunctionalOptimizer> OptimizerSpec::build(std::vector<at::Tensor> parameters) const {
  if (build_) return build_(std::move(parameters));
  throw Error(ErrorKind::kInvalid,
              kind.empty() ? "a spec is empty; create it from an optimizer's options, as in Adam{.lr = 0.01}"
                           : fmt::format("the spec of '{}' came from another worker; build it with this "
                                         "worker's OptimizerTable",
                                         kind));
}

void OptimizerTable::insert(std::string_view kind, Entry entry) {
  if (!entries_.emplace(kind, std::move(entry)).second) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("there is an optimizer '{}' already; choose another kName", kind));
  }
}

std::vector<std::string> OptimizerTable::kinds() const {
  std::vector<std::string> kinds;
  for (const auto& [kind, entry] : entries_) kinds.push_back(kind);
  return kinds;
}

std::unique_ptr<FunctionalOptimizer> OptimizerTable::build(const OptimizerSpec& spec,
                                                           std::vector<at::Tensor> parameters) const {
  const auto found = entries_.find(spec.kind);
  if (found == entries_.end()) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format(
            "there is no optimizer '{}' here, only {}; add its options to the OptimizerTable of every worker",
            spec.kind, fmt::join(kinds(), ", ")));
  }
  if (found->second.type != spec.type) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("the options of optimizer '{}' have another layout here than where the spec was created; "
                    "run the same version of the program on all workers",
                    spec.kind));
  }
  return found->second.build(spec.options, std::move(parameters));
}

}  // namespace torchspan::optim
