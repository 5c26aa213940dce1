#include <torchspan/pipeline/pipeline.h>

using namespace torchspan::pipeline;

struct Session {};
struct Encoder {};

#if USE == 1
void make(Session& session, Layers layers) {
  Pipeline pipe(session, layers,
                {.balance = {2, 2}, .micro_batches = 8, .checkpoint = Checkpoint::kExceptLast});
}
#elif USE == 2
at::Tensor train(Pipeline& pipe, at::Tensor input, at::Tensor target) {
  return pipe.train_step(input, target, [](at::Tensor output, at::Tensor) { return output; });
}
#elif USE == 3
int describe(Layers& layers) { return layers.add<Encoder>(256); }
#endif
