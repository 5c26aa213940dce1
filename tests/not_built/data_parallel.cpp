#include <map>
#include <memory>

#include <torchspan/data_parallel/data_parallel.h>

struct Model {
  at::Tensor forward(at::Tensor input) { return input; }
};
using Holder = std::shared_ptr<Model>;

#if USE == 1
void wrap(Holder model, torchspan::collective::Group group) {
  torchspan::DistributedDataParallel wrapped(model, group, {.bucket_cap_mb = 25});
}
#elif USE == 2
void reduce(std::map<std::string, at::Tensor>& parameters, torchspan::collective::Group group) {
  torchspan::data_parallel::Reducer reducer(parameters, group);
}
#endif
