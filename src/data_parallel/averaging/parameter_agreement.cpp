#include "data_parallel/averaging/parameter_agreement.h"

#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "state/api/at_place.h"

namespace torchspan::data_parallel {

std::string parameter_name(std::size_t index) { return fmt::format("parameter {}", index); }

Agreement agreement_on(const collective::Group& group, const std::vector<at::Tensor>& parameters,
                       std::vector<std::pair<std::string, std::string>> settings) {
  Agreement agreement;
  agreement.settings = std::move(settings);
  if (parameters.empty()) agreement.failure = "there are no parameters to average";
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i];
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

std::vector<at::Tensor> averaged_elements(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> elements;
  for (const at::Tensor& parameter : parameters)
    elements.push_back(state::elements_of(parameter, state::place_of(parameter)));
  return elements;
}

}  // namespace torchspan::data_parallel
