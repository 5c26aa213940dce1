#include <fmt/format.h>

#include <torchspan/pipeline/batch.h>

namespace torchspan::pipeline {

Batch& Batch::mark_unsplit(std::size_t member) {
  if (unsplit.size() <= member) unsplit.resize(member + 1);
  unsplit[member] = 1;
  return *this;
}

void batch_detail::refuse(const char* wanted, const c10::IValue& there) {
  throw Error(ErrorKind::kInvalid,
              fmt::format("the layer takes {}, but its input is {}", wanted,
                          there.isNone() ? "nothing (None)" : "a value of type " + there.tagKind()));
}

const at::Tensor& Batch::tensor() const {
  if (members.size() != 1 || !members.front().isTensor()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("expected a single tensor; the batch has {} members", members.size()));
  }
  return members.front().toTensor();
}

}  // namespace torchspan::pipeline
