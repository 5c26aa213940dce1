#include "collective/mpi/mpi.h"

#if defined(TORCHSPAN_MPI)
#include <algorithm>
#include <climits>
#include <cstdlib>
#include <fmt/format.h>
#include <mpi.h>
#include <numeric>

#include "collective/tensors.h"

namespace torchspan::collective {
namespace {

/// Most bytes per call: MPI counts in int.
constexpr std::int64_t kMostAtOnce = std::int64_t{1} << 30;

void check(int outcome, const char* call) {
  if (outcome == MPI_SUCCESS) return;
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int size = 0;
  MPI_Error_string(outcome, text.data(), &size);
  text.resize(static_cast<std::size_t>(size));
  throw Error(ErrorKind::kDisconnected, fmt::format("{}: {}", call, text));
}

/// Excludes narrow integers: with vector instructions, Open MPI 4.1 adds these with saturation.
MPI_Datatype mpi_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kInt:
      return MPI_INT32_T;
    case at::kLong:
      return MPI_INT64_T;
    default:
      return MPI_DATATYPE_NULL;
  }
}

MPI_Op mpi_op(ReduceOp reduction) {
  switch (reduction) {
    case kMin:
      return MPI_MIN;
    case kMax:
      return MPI_MAX;
    case kProduct:
      return MPI_PROD;
    default:
      return MPI_SUM;
  }
}

/// Uses a private communicator, so that messages of other users of MPI cannot match.
class MpiCollectives final : public BlockingCollectives {
 public:
  explicit MpiCollectives(MPI_Comm communicator) : communicator_(communicator) {
    MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
  }
  ~MpiCollectives() override {
    int ended = 0;
    MPI_Finalized(&ended);
    if (ended == 0) MPI_Comm_free(&communicator_);
  }

  std::string name() const override { return "mpi"; }
  bool reduces(at::ScalarType dtype, ReduceOp reduction) const override {
    const bool known = reduction == kSum || reduction == kMin || reduction == kMax || reduction == kProduct;
    return known && !loses_nan(dtype, reduction) && mpi_type(dtype) != MPI_DATATYPE_NULL;
  }

  void all_reduce(at::Tensor tensor, ReduceOp reduction) override {
    const at::Tensor flat = tensor.view({-1});
    const std::int64_t step = kMostAtOnce / static_cast<std::int64_t>(tensor.element_size());
    for (std::int64_t at = 0; at < flat.numel(); at += step) {
      const std::int64_t count = std::min(step, flat.numel() - at);
      check(MPI_Allreduce(MPI_IN_PLACE, flat.narrow(0, at, count).data_ptr(), static_cast<int>(count),
                          mpi_type(tensor.scalar_type()), mpi_op(reduction), communicator_),
            "MPI_Allreduce");
    }
  }

  void broadcast(at::Tensor tensor, int root) override {
    auto* data = static_cast<char*>(tensor.data_ptr());
    for (std::int64_t left = tensor.numel(); left > 0;) {
      const std::int64_t count = std::min(left, kMostAtOnce);
      check(MPI_Bcast(data, static_cast<int>(count), MPI_BYTE, root, communicator_), "MPI_Bcast");
      data += count;
      left -= count;
    }
  }

  void all_gather(at::Tensor mine, at::Tensor all) override {
    if (all.numel() <= kMostAtOnce) {
      const int count = static_cast<int>(mine.numel());
      check(MPI_Allgather(mine.data_ptr(), count, MPI_BYTE, all.data_ptr(), count, MPI_BYTE, communicator_),
            "MPI_Allgather");
      return;
    }
    for (int rank = 0; rank < static_cast<int>(all.size(0)); ++rank) {
      if (rank == this->rank()) all[rank].copy_(mine);
      broadcast(all[rank], rank);
    }
  }

  void all_to_all(at::Tensor mine, at::Tensor all, const ByteCounts& counts) override {
    const std::vector<std::int64_t> mine_counts = counts.sent_by(rank()),
                                    all_counts = counts.received_by(rank());
    check_sizes(mine_counts, all_counts);
    const auto [sent, sent_at] = layout(mine_counts);
    const auto [received, received_at] = layout(all_counts);
    check(MPI_Alltoallv(mine.data_ptr(), sent.data(), sent_at.data(), MPI_BYTE, all.data_ptr(),
                        received.data(), received_at.data(), MPI_BYTE, communicator_),
          "MPI_Alltoallv");
  }

  std::unique_ptr<BlockingCollectives> split(const std::vector<int>& members, std::uint64_t) override {
    const int color = *std::min_element(members.begin(), members.end());
    const auto key = std::find(members.begin(), members.end(), rank()) - members.begin();
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(communicator_, color, static_cast<int>(key), &part), "MPI_Comm_split");
    return std::make_unique<MpiCollectives>(part);
  }

 private:
  struct Layout {
    std::vector<int> counts;
    std::vector<int> places;
  };
  static Layout layout(const std::vector<std::int64_t>& counts) {
    Layout layout;
    std::int64_t at = 0;
    for (const std::int64_t count : counts) {
      layout.counts.push_back(static_cast<int>(count));
      layout.places.push_back(static_cast<int>(at));
      at += count;
    }
    return layout;
  }
  /// Throws on all ranks if one of them sends or receives too much: nothing could end the others' operation.
  void check_sizes(const std::vector<std::int64_t>& sent, const std::vector<std::int64_t>& received) const {
    std::int64_t most = std::max(std::accumulate(sent.begin(), sent.end(), std::int64_t{0}),
                                 std::accumulate(received.begin(), received.end(), std::int64_t{0}));
    check(MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_INT64_T, MPI_MAX, communicator_), "MPI_Allreduce");
    if (most > INT_MAX)
      throw Error(
          ErrorKind::kUnsupported,
          fmt::format("a rank sends or receives {} bytes, but all_to_all, gather and scatter over Open "
                      "MPI are limited to 2 GiB a rank; send smaller parts",
                      most));
  }
  int rank() const {
    int rank = 0;
    MPI_Comm_rank(communicator_, &rank);
    return rank;
  }

  MPI_Comm communicator_;
};

/// Runs at the end of the process: mpirun reports a failure if a worker ends without it.
void finalize() {
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended == 0) MPI_Finalize();
}

/// Initializes MPI if necessary; throws unless MPI's world has this rank and size.
void check_world(int world_rank, int world_size) {
  int begun = 0, level = 0, rank = 0, size = 0;
  MPI_Initialized(&begun);
  if (begun == 0) {
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    std::atexit(finalize);
  } else {
    MPI_Query_thread(&level);
  }
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (level < MPI_THREAD_MULTIPLE) {
    throw Error(ErrorKind::kUnsupported,
                "MPI was initialized without MPI_THREAD_MULTIPLE, which a group needs");
  }
  if (rank != world_rank || size != world_size) {
    throw Error(ErrorKind::kUnsupported, fmt::format("Open MPI has this process as rank {} of {}, but it is "
                                                     "rank {} of {}: start the workers with mpirun",
                                                     rank, size, world_rank, world_size));
  }
}

}  // namespace

std::unique_ptr<BlockingCollectives> connect_mpi(const std::vector<int>& ranks, int world_rank,
                                                 int world_size) {
  check_world(world_rank, world_size);
  MPI_Group all_ranks = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  MPI_Comm communicator = MPI_COMM_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &all_ranks), "MPI_Comm_group");
  check(MPI_Group_incl(all_ranks, static_cast<int>(ranks.size()), ranks.data(), &members), "MPI_Group_incl");
  check(MPI_Comm_create_group(MPI_COMM_WORLD, members, 0, &communicator), "MPI_Comm_create_group");
  MPI_Group_free(&members);
  MPI_Group_free(&all_ranks);
  return std::make_unique<MpiCollectives>(communicator);
}

}  // namespace torchspan::collective

#else

namespace torchspan::collective {

std::unique_ptr<BlockingCollectives> connect_mpi(const std::vector<int>&, int, int) {
  throw Error(
      ErrorKind::kUnsupported,
      "this build has no Open MPI: install libopenmpi-dev and configure again, or use another backend");
}

}  // namespace torchspan::collective

#endif
