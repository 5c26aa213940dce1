#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/future.h>

namespace torchspan::data_parallel {

/// One bucket on its way: the gradients of some parameters of this rank, not divided by anything.
struct GradientBucket {
  std::size_t index = 0;  ///< position in the order of reduction
  bool is_last = false;
  at::Tensor buffer;                    ///< flat; or the one sparse gradient. The hook may overwrite it
  std::vector<at::Tensor> gradients;    ///< views of `buffer`, shaped like the parameters
  std::vector<std::string> parameters;  ///< their names
  std::vector<at::Tensor> parameter_tensors;
  double divisor = 1;  ///< what turns a sum over all ranks into the average
};

/// Reduces one bucket over all ranks: the future gives the average, shaped like the buffer, which may be the
/// buffer itself. Called in the order of buckets, by the thread that runs backward, with no lock held;
/// buckets overlap. It issues its operations on `group` before it returns: later ones would not come in one
/// order on all ranks. A failed future, or a wrong answer, fails the backward pass here and on the other
/// ranks; an exception also ends the reducer's group, since the others may be waiting inside the hook.
using CommHook =
    std::function<Future<at::Tensor>(const GradientBucket& bucket, const collective::Group& group)>;

/// Sends `buffer` / divisor and sums: what happens without a hook.
CommHook all_reduce_hook();
/// Sends gradients as half or bfloat16, in half of the bytes of float, divided before they are sent.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();
/// The same around another hook, which then sees, and answers, 16-bit buckets.
CommHook fp16_compress_wrapper(CommHook inner);
CommHook bf16_compress_wrapper(CommHook inner);

/// A buffer under the module's name for it. Autograd does not see what is written to this tensor.
struct NamedBuffer {
  std::string name;
  at::Tensor tensor;
};

/// Where a buffer hook is called: before the module's forward, which then waits for its futures; or after it,
/// so that buffers travel while the program goes on: backward does not end, and the next forward does not
/// begin, before they have arrived.
enum class BufferHookTime : std::uint8_t { kBeforeForward, kAfterForward };

/// Brings the ranks' buffers together, in place, instead of a broadcast of rank 0's. Called with each reduced
/// forward, on the thread that trains. It issues its operations on `group`, the same on all ranks, before it
/// returns; what it returns is waited for, and a failure there is that of the forward, or of the backward
/// pass on all ranks. An exception also ends the reducer's group, as CommHook's does.
using BufferHook = std::function<std::vector<Future<at::Tensor>>(const std::vector<NamedBuffer>& buffers,
                                                                 const collective::Group& group)>;

}  // namespace torchspan::data_parallel
