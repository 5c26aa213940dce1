#include "sharded/zero/settled_source.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/scalar_tensor.h>

#include <torchspan/core/error.h>

namespace torchspan::sharded {

void SettledSource::save(state::StateWriter& writer) const {
  check();
  source_->save(writer);
  for (const std::string& owner : never_stepped_)
    writer.add(owner + ".step", at::scalar_tensor(0, at::kLong));
}

void SettledSource::load(const state::StateReader& reader) {
  check();
  source_->load(reader);
}

void SettledSource::check() const {
  if (!arriving_()) return;
  throw Error(ErrorKind::kInvalid,
              "the parameters of the last step() still arrive, because overlap_forward is set; call "
              "synchronize() of the ZeroRedundancyOptimizer before state is saved or restored");
}

}  // namespace torchspan::sharded
