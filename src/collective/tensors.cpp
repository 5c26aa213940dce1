#include "collective/tensors.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <random>
#include <tuple>

#include <ATen/core/ivalue.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include "collective/kernels.h"
#include "core/api/hashes.h"
#include "core/api/throw_invalid.h"
#include "device/api/tensors.h"

namespace torchspan::collective {

std::string name_of_dtype(std::int8_t dtype) {
  const bool known = dtype >= 0 && dtype < static_cast<std::int8_t>(at::ScalarType::NumOptions);
  return known ? c10::toString(static_cast<at::ScalarType>(dtype)) : std::to_string(dtype);
}

bool loses_nan(at::ScalarType dtype, ReduceOp reduction) {
  return at::isFloatingType(dtype) && (reduction == kMin || reduction == kMax);
}

at::Tensor plain(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor put_back(const at::Tensor& worked_on, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  // The thread of a group is in no inference mode, but the caller's tensor may be from one.
  const at::AutoDispatchBelowADInplaceOrView unversioned;
  if (worked_on.data_ptr() != tensor.data_ptr()) tensor.detach().copy_(worked_on);
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return tensor;
}

std::string different_shapes(std::size_t rank, at::IntArrayRef theirs, at::IntArrayRef own) {
  return fmt::format(
      "all_gather_into_tensor needs tensors of one shape, but that of rank {} is [{}] and this rank's [{}]: "
      "use all_gather()",
      rank, fmt::join(theirs.vec(), ", "), fmt::join(own.vec(), ", "));
}

SplitPlan plan_split(const GatherBytes& gather, int color, int key) {
  std::random_device random;
  ByteWriter writer;
  writer.put(color);
  writer.put(key);
  writer.put(std::uint64_t{random()} << 32 | random());
  struct Choice {
    int color;
    int key;
    int rank;
  };
  std::vector<Choice> choices;
  SplitPlan plan;
  for (const Bytes& answer : gather(writer.bytes())) {
    ByteReader reader(answer);
    const int their_color = reader.get<int>();
    const int their_key = reader.get<int>();
    const auto number = reader.get<std::uint64_t>();
    if (choices.empty()) plan.number = number;
    choices.push_back({their_color, their_key, static_cast<int>(choices.size())});
  }
  std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    return std::tie(a.key, a.rank) < std::tie(b.key, b.rank);
  });
  for (const Choice& choice : choices) {
    if (choice.color == color) plan.ranks.push_back(choice.rank);
  }
  return plan;
}

void check_reducible(const at::Tensor& tensor, ReduceOp reduction) {
  find_kernel(tensor.scalar_type(), reduction);
  if (!tensor.is_sparse() || reduction == kSum || reduction == kAvg) return;
  throw Error(ErrorKind::kUnsupported,
              fmt::format("the {} of sparse tensors is not supported, because missing entries have no value; "
                          "convert them with to_dense() first",
                          to_string(reduction)));
}

at::Tensor sum_of_sparse(const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef sizes,
                         std::int64_t divisor) {
  const at::NoGradGuard no_grad;
  const at::Tensor sum = at::sparse_coo_tensor(indices, device::widened(values), sizes).coalesce();
  if (divisor != 1) sum.values().div_(divisor);
  if (sum.scalar_type() == values.scalar_type()) return sum;
  return at::sparse_coo_tensor(sum.indices(), sum.values().to(values.scalar_type()), sizes)._coalesced_(true);
}

std::string_view name_of(CoalescedCall::Verb verb) {
  switch (verb) {
    case CoalescedCall::Verb::kAllReduce:
      return "all_reduce_coalesced";
    case CoalescedCall::Verb::kReduceScatter:
      return "reduce_scatter_coalesced";
    case CoalescedCall::Verb::kAllGather:
      return "all_gather_into_tensor_coalesced";
  }
  return "an unknown operation";
}

std::string shapes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::string> shapes;
  for (const at::Tensor& tensor : tensors) {
    shapes.push_back(fmt::format("[{}]", fmt::join(tensor.sizes().vec(), ", ")));
  }
  return fmt::format("{}", fmt::join(shapes, ", "));
}

at::Tensor join_rows(const std::vector<at::Tensor>& tensors, std::int64_t rows) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(plain(tensor).view({rows, tensor.numel() / rows}));
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 1);
}

std::vector<at::Tensor> cut_row(const at::Tensor& row, const std::vector<std::vector<std::int64_t>>& sizes) {
  std::vector<at::Tensor> parts;
  std::int64_t at = 0;
  for (const std::vector<std::int64_t>& shape : sizes) {
    const std::int64_t count = c10::multiply_integers(shape);
    parts.push_back(row.narrow(0, at, count).view(shape));
    at += count;
  }
  return parts;
}

std::string line_of_tensor(const char* verb, const at::Tensor& tensor, const std::string& more,
                           bool first_free) {
  std::vector<std::string> sizes;
  for (const std::int64_t size : tensor.sizes()) sizes.push_back(std::to_string(size));
  if (first_free && !sizes.empty()) sizes[0] = "*";
  return fmt::format("{}({}{} [{}]{})", verb, tensor.is_sparse() ? "sparse " : "",
                     name_of_dtype(static_cast<std::int8_t>(tensor.scalar_type())), fmt::join(sizes, ", "),
                     more);
}

std::string line_of_reduction(const char* verb, const at::Tensor& tensor, ReduceOp reduction,
                              const std::string& more) {
  check_reducible(tensor, reduction);
  return line_of_tensor(verb, tensor, fmt::format(", {}{}", to_string(reduction), more));
}

std::string line_of_coalesced(const CoalescedCall& call, const at::Tensor& flat) {
  const bool gathers = call.verb == CoalescedCall::Verb::kAllGather;
  if (!gathers) check_reducible(flat, call.reduction);
  return fmt::format("{}({} {}{})", name_of(call.verb), c10::toString(flat.scalar_type()), call.shapes,
                     gathers ? "" : ", " + to_string(call.reduction));
}

std::string line_of_all_to_all(const std::vector<at::Tensor>& parts) {
  return fmt::format("all_to_all({} parts)", c10::toString(parts[0].scalar_type()));
}

std::string line_of_rooted(const RootedCall& call, const std::vector<at::Tensor>& parts) {
  const bool gathers = call.verb == RootedCall::Verb::kGather;
  return fmt::format("{}({}, {} rank {})", gathers ? "gather" : "scatter",
                     c10::toString(parts[0].scalar_type()), gathers ? "to" : "from", call.root);
}

void throw_different_calls(const std::string& peer, const std::string& call, const std::string& other_peer,
                           const std::string& other_call) {
  throw_invalid(
      "the ranks of a group must call the same operations in the same order, but {} called {}, and {} called "
      "{}",
      peer, call, other_peer, other_call);
}

std::int64_t common_sparse_dim(const std::vector<std::vector<std::int64_t>>& all, const std::string& line,
                               const std::vector<std::string>& peers) {
  std::size_t first = 0;  // rank with entries
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[first].at(0) == 0) first = rank;
    if (all[rank].at(0) == 0 || all[rank].at(1) == all[first].at(1)) continue;
    const auto call = [&](std::size_t of) {
      return fmt::format("{} with {} sparse dimensions", line, all[of][1]);
    };
    throw_different_calls(peers[first], call(first), peers[rank], call(rank));
  }
  return all[all[first][0] == 0 ? 0 : first].at(1);
}

LineBytes pack_line(const std::string& line, std::uint64_t number) {
  const std::string head = fmt::format("{} {:016x} ", number, fnv1a(line));
  LineBytes bytes{};
  const std::string text = head + line;
  std::copy_n(text.begin(), std::min(text.size(), bytes.size() - 1), bytes.begin());
  return bytes;
}

std::string unpack_line(const LineBytes& bytes) {
  const std::string text(bytes.begin(), std::find(bytes.begin(), bytes.end(), '\0'));
  const std::size_t number = text.find(' ');
  const std::size_t sum = number == std::string::npos ? number : text.find(' ', number + 1);
  return sum == std::string::npos ? text : text.substr(sum + 1);
}

}  // namespace torchspan::collective
