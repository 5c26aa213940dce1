#include "launch/supervisor/host_answers.h"

#include <map>
#include <utility>

namespace torchspan::launch {
namespace {

/// Of other launchers, which ask one at a time.
constexpr std::size_t kMostAsked = 1024;
constexpr Duration kWhileDescribing = std::chrono::milliseconds(2);

}  // namespace

void send_to_host(net::Channel& channel, const HostMessage& header, const std::string& body) {
  const auto text = std::make_shared<const std::string>(body);
  const Segment segment{reinterpret_cast<const std::byte*>(text->data()), text->size(), text};
  const std::size_t count = body.empty() ? 0 : 1;
  channel.send(encode_host_message(header), std::span(&segment, count));
}

HostAnswers::HostAnswers(Executor& executor, int node)
    : executor_(executor), node_(node), parker_(executor.make_parker()) {
  thread_ = executor_.spawn("torchspan.answer", [this] { run(); });
}

HostAnswers::~HostAnswers() {
  stopping_ = changing_ = true;
  parker_->unpark();
  thread_.join();
}

void HostAnswers::set_describe(Describe describe) {
  changing_ = true;
  {
    MutexLock lock(mutex_);
    describe_ = describe ? std::make_shared<const Describe>(std::move(describe)) : nullptr;
  }
  for (;; executor_.sleep(kWhileDescribing)) {
    MutexLock lock(mutex_);
    if (!describing_) break;
  }
  changing_ = false;
}

void HostAnswers::add(std::shared_ptr<net::Channel> channel, const HostMessage& question) {
  {
    MutexLock lock(mutex_);
    if (asked_.size() < kMostAsked) asked_.push_back({std::move(channel), question});
  }
  parker_->unpark();
}

void HostAnswers::run() {
  while (!stopping_) {
    parker_->park(Deadline::never());
    std::map<bool, std::string> reports;  // one answer for all that ask at the same time
    for (const Asked& asked : take()) {
      HostMessage header = asked.message;
      header.kind = HostMessage::Kind::kAnswer;
      const bool known = std::exchange(header.version, HostMessage::kVersion) == HostMessage::kVersion;
      if (known && !reports.contains(header.brief)) {
        reports[header.brief] = encode_host_report(describe(header.brief));
      }
      try {
        send_to_host(*asked.channel, header, known ? reports[header.brief] : "");
      } catch (const Error&) {
        asked.channel->close();  // the asking launcher has ended
      }
    }
  }
}

std::deque<HostAnswers::Asked> HostAnswers::take() {
  MutexLock lock(mutex_);
  return std::exchange(asked_, {});
}

HostReport HostAnswers::describe(bool brief) {
  std::shared_ptr<const Describe> describe;
  {
    MutexLock lock(mutex_);
    describe = describe_;
    describing_ = describe != nullptr;
  }
  HostReport report{.trouble = "no workers run there at the moment", .workers = {}};
  if (describe) {
    report = (*describe)(brief, changing_);
    describe.reset();
    MutexLock lock(mutex_);
    describing_ = false;
  }
  report.node = node_;
  return report;
}

}  // namespace torchspan::launch
