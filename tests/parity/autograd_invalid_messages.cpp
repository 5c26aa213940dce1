// A peer that sends wrong messages about passes: none of them removes a gradient without an error, and
// impossible ones get an error.
#include <algorithm>
#include <limits>

#include "autograd/messages/messages.h"
#include "autograd/messages/sending.h"
#include "tests/parity/autograd_slow.h"
#include "tests/parity/rpc_faults.h"

namespace torchspan::autograd_invalid_messages {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;
using ::testing::HasSubstr;

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
at::Tensor slowly(Worker& worker, const at::Tensor& x) {
  return sleeps_in_backward(x, worker.runtime(), seconds(2));
}
constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<slowly> kSlowly{"slowly"};

/// The ids of the pass whose gradients arrived first, and of the message for which they were.
struct Seen {
  std::atomic<std::uint64_t> context{0}, pass{0}, message{0};
  std::atomic<bool> over{false};
};

void listen(SimCluster& cluster, Seen& seen) {
  cluster.network().observe([&seen](const net::SimMessage& message) {
    if (message.from.ends_with(".membership") || !message.from.starts_with("sim:worker")) return;
    const auto frame = wire::decode_frame(message.header);
    const bool request = (frame.header.flags & wire::kFlagReply) == 0;
    if (!request || frame.header.type != autograd::PropagateGradients::kType || seen.message != 0) return;
    ByteReader reader(frame.value);
    seen.context = reader.get<std::uint64_t>();
    seen.pass = reader.get<std::uint64_t>();
    seen.message = reader.get<std::uint64_t>();
  });
}

using SendInvalid = std::function<void(Worker& sender, const Seen& seen)>;
using Then = std::function<void(Worker& worker, Context& context, const at::Tensor& leaf)>;

/// Worker 0 differentiates through worker 2, which takes two seconds, with marks that take one; meanwhile
/// worker 1, which is also in the context, sends wrong messages. Returns the error of backward(), if any.
std::optional<Error> with_invalid_sender(PassMode mode, const SendInvalid& lie, const Then& then = {}) {
  Seen seen;
  std::optional<Error> failure;
  SimCluster cluster(autograd_world(3, FunctionTable().add(kMultiply, kSlowly)));
  listen(cluster, seen);
  const auto is_mark = [](const net::SimMessage& message) {
    if (message.from.ends_with(".membership") || !message.from.starts_with("sim:worker")) return false;
    return wire::decode_frame(message.header).header.type == autograd::MarkSends::kType;
  };
  cluster.network().delay_if(is_mark, seconds(1));
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 1) {
      while (seen.message == 0 && !seen.over) nap(worker, milliseconds(1));
      if (!seen.over) lie(worker, seen);
    }
    if (worker.rank() != 0) return;
    const at::Tensor a = parameter();
    Context context(worker);
    const at::Tensor loss = worker.rpc_sync("worker2", kSlowly, a).sum();
    worker.rpc_sync("worker1", kMultiply, a.detach(), a.detach());
    try {
      context.backward(loss, {.retain_graph = true, .mode = mode, .timeout = seconds(30)});
      expect_equal(context.gradient(a), at::ones_like(a));
    } catch (const Error& error) {
      failure = error;
    }
    seen.over = true;
    if (then) then(worker, context, a);
  });
  EXPECT_NE(seen.message, 0U);
  return failure;
}

template <class M>
auto send_to(Worker& sender, std::uint32_t to, const M& message) {
  return sender.request(Destination(to), message, sender.runtime().executor.deadline_in(seconds(20))).wait();
}

TEST(AutogradInvalidMessages, OnlyTheRootMayFinalizeMarks) {
  for (const PassMode mode : {PassMode::kFast, PassMode::kSmart}) {
    for (const std::uint32_t to : {0U, 2U}) {
      const auto failure = with_invalid_sender(mode, [&](Worker& sender, const Seen& seen) {
        send_to(sender, to, autograd::MarksFinal{seen.context, seen.pass});
      });
      EXPECT_FALSE(failure) << failure->what();
    }
  }
}

TEST(AutogradInvalidMessages, GradientsMustComeFromTheReceiverOfTheTensors) {
  for (const PassMode mode : {PassMode::kFast, PassMode::kSmart}) {
    const auto failure = with_invalid_sender(mode, [&](Worker& sender, const Seen& seen) {
      autograd::PropagateGradients stolen{seen.context,    seen.pass, seen.message, true, 1,
                                          {at::ones({2})}, {}};
      if (mode == PassMode::kSmart) stolen.reached = {1};
      const autograd::PartOver answer = send_to(sender, 2, stolen);
      ASSERT_TRUE(answer.failure);
      EXPECT_THAT(answer.failure->what(), HasSubstr("came from a worker that it was not sent to"));
    });
    ASSERT_TRUE(failure);
    EXPECT_THAT(failure->what(), HasSubstr("came from a worker that it was not sent to"));
  }
}

TEST(AutogradInvalidMessages, AnAbortAffectsOnlyThePassThatItNames) {
  const auto failure = with_invalid_sender(
      PassMode::kSmart,
      [](Worker& sender, const Seen& seen) {
        send_to(sender, 2,
                autograd::AbortPass{seen.context, seen.pass + 1000, Error(ErrorKind::kCancelled, "a lie")});
      },
      [](Worker& worker, Context& context, const at::Tensor& a) {
        context.clear_gradients();
        context.backward(worker.rpc_sync("worker2", kMultiply, a, a).sum());
        expect_equal(context.gradient(a), a.detach() * 2);
      });
  EXPECT_FALSE(failure) << failure->what();
}

TEST(AutogradInvalidMessages, NoQuestionWaitsLongerThanTheLimit) {
  SimCluster cluster(autograd_world(2, FunctionTable().add(kMultiply, kSlowly)));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const at::Tensor a = parameter();
    Context context(worker);
    worker.rpc_sync("worker1", kMultiply, a, a);
    cluster.network().drop_if([](const net::SimMessage& message) {
      return message.to.starts_with("sim:worker0") && request_type(message) == autograd::AskGraph::kType;
    });
    for (const std::int64_t patience :
         {std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
      const autograd::AskGraph question{context.id(), static_cast<std::uint64_t>(patience), patience};
      const Deadline deadline = worker.runtime().executor.deadline_in(2 * autograd::kLongestPatience);
      const auto graphs = worker.request(Destination(1), question, deadline).wait();
      EXPECT_EQ(std::count_if(graphs.begin(), graphs.end(), [](const auto& graph) { return graph.silent; }),
                1)
          << "worker 0 does not answer";
    }
    cluster.network().drop_if({});
  });
}

/// Worker 2 gets the gradients of its reply from worker 0, and sends any claim about its own message.
TEST(AutogradInvalidMessages, GradientsArriveOnceAndNameWhatTheyReach) {
  for (const bool twice : {true, false}) {
    std::optional<Error> failure;
    Seen seen;
    SimCluster cluster(autograd_world(2, FunctionTable().add(kMultiply, kSlowly)));
    listen(cluster, seen);
    cluster.run([&](Worker& worker) {
      if (worker.rank() != 0) return;
      const at::Tensor a = parameter();
      Context context(worker);
      const at::Tensor loss = worker.rpc_sync("worker1", kSlowly, a).sum();
      Thread sender = worker.runtime().executor.spawn("sender", [&] {
        while (seen.message == 0) nap(worker, milliseconds(1));
        nap(worker, milliseconds(100));
        autograd::PropagateGradients again{
            seen.context, seen.pass, seen.message, true, 1, {at::ones({2}, at::kDouble)}, {}};
        again.reached.assign(twice ? 1 : 2, 1);
        const autograd::PartOver answer = send_to(worker, 1, again);
        ASSERT_TRUE(answer.failure);
        EXPECT_THAT(answer.failure->what(), HasSubstr(twice ? "arrived twice" : "does not say for each"));
      });
      try {
        context.backward(loss, {.retain_graph = true, .timeout = seconds(30)});
      } catch (const Error& error) {
        failure = error;
      }
    });
    ASSERT_TRUE(failure);
    EXPECT_NE(failure->kind(), ErrorKind::kTimedOut) << failure->what();
  }
}

}  // namespace
}  // namespace torchspan::autograd_invalid_messages
