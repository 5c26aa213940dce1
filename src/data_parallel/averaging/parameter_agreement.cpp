#include "data_parallel/averaging/parameter_agreement.h"

#include <algorithm>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "state/api/save_load.h"

namespace torchspan::data_parallel {

std::string parameter_name(std::size_t index) { return fmt::format("parameter {}", index); }

Agreement agreement_on(const collective::Group& group, const std::vector<at::Tensor>& parameters,
                       std::vector<std::pair<std::string, std::string>> settings) {
  Agreement agreement;
  agreement.settings = std::move(settings);
  if (std::none_of(parameters.begin(), parameters.end(), is_averaged)) {
    agreement.failure = "there are no parameters to average";
    if (!parameters.empty()) {
      agreement.failure += fmt::format(": {} is {}, and no other one has a floating-point dtype",
                                       parameter_name(0), c10::toString(parameters[0].scalar_type()));
    }
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i];
    if (!is_averaged(tensor)) {
      agreement.add(parameter_name(i), tensor);
      continue;
    }
    if (!tensor.defined() || tensor.is_sparse() || !tensor.is_floating_point()) {
      agreement.failure = fmt::format(
          "{} is {}; only dense tensors of a floating-point dtype can be averaged", parameter_name(i),
          tensor.defined() ? c10::toString(tensor.scalar_type()) : "undefined");
      return agreement;
    }
    const state::PlacePtr place = state::place_of(tensor);
    if (place && place->own) {
      agreement.failure = fmt::format(
          "{} is this rank's own (DataParallelOptions::ignored_parameters), so it has no average: leave it "
          "out",
          parameter_name(i));
      return agreement;
    }
    try {
      check_device(group, parameter_name(i), tensor);
    } catch (const Error& error) {
      agreement.failure = error.message();
      return agreement;
    }
    agreement.add(parameter_name(i), tensor);
  }
  return agreement;
}

bool is_averaged(const at::Tensor& tensor) {
  return !tensor.defined() || !c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

at::Tensor averaged_elements(const at::Tensor& parameter) {
  return state::elements_of(parameter, state::place_of(parameter));
}

}  // namespace torchspan::data_parallel
