#include <torchspan/optim/optimizer.h>

namespace torchspan {

void Wire<optim::StateDict>::encode(wire::Encoder& encoder, const optim::StateDict& value) {
  optim::StateDict::Entries entries;
  for (const auto& entry : value) entries.emplace_back(entry.key(), entry.value());
  wire::encode<optim::StateDict::Entries>(encoder, entries);
}

optim::StateDict Wire<optim::StateDict>::decode(wire::Decoder& decoder) {
  return optim::StateDict(wire::decode<optim::StateDict::Entries>(decoder));
}

}  // namespace torchspan
