#include <torchspan/pipeline/layers.h>
#include <torchspan/rpc/value.h>

namespace torchspan::pipeline::layers_detail {

std::string type_name(const std::type_info& type) { return rpc::demangle(type); }

}  // namespace torchspan::pipeline::layers_detail
